"""A scheme of the reader's own within a budget of bytes, and its place among the course's."""

import itertools
import json
import statistics
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import RankError, run
from dplab.checks.compare import AtMost
from dplab.checks.exercise import PASSED, Exercise
from dplab.checks.mistakes import Slip
from dplab.desk import course
from dplab.measure.call_log import CallLog, sent_bytes
from dplab.workloads.digits import digits_classifier, load_digits
from dplab.workloads.scheme_tasks import LANGUAGE, RANKS, train


class Scheme:
    rate = 0.006

    def __init__(self, model, optimizer, steps):
        self.parameters, self.optimizer = list(model.parameters()), optimizer
        self.anchor = parameters_to_vector(self.parameters).detach().clone()
        self.kept = torch.zeros_like(self.anchor)
        self.done, self.steps = 0, steps

    def step(self):
        self.optimizer.step()
        self.done += 1
        if self.done % 16 == 0 or self.done == self.steps:
            self.meet()

    @torch.no_grad()
    def meet(self):
        change = parameters_to_vector(self.parameters) - self.anchor + self.kept
        world_size = dist.get_world_size()
        unit = change.abs().max() / (127 // world_size)
        dist.all_reduce(unit, op=dist.ReduceOp.MAX)
        numbers = (change / unit).round().to(torch.int8)
        self.kept = change - numbers * unit
        dist.all_reduce(numbers)
        self.anchor += numbers * unit / world_size
        vector_to_parameters(self.anchor.clone(), self.parameters)


BUDGET = 40  # times less than a synchronous step sends
LONGEST = 16  # steps from one meeting to the next
STEPS, LOCAL_BATCH = 130, 16  # of a trial
MOST_LOSS = 2.0  # at the end of one: an untrained model has 2.3
LAST = "the bytes that a rank sends per step"
ONE = "that all ranks end with the same weights"
MEET = "that the ranks meet after the last step"
OFTEN = f"that the ranks meet at least every {LONGEST} steps"
ALIKE = "that a weight goes where all ranks take it"
ADD_UP = "that small changes add up until they are sent"
LONG, SMALL = 2000, 0.005  # steps with the same gradient; its small elements, the others being 1
ARRIVES = 0.1  # of the way of small changes, at least


class ByteBudget(Exercise):
    number = "13.3"
    title = "A scheme within a budget"
    minutes = 30
    solution = Scheme
    world_sizes = (2, 4)
    again = False
    seconds = 20.0

    def judge(self, *objects, **options):
        """The verdict; on a right scheme, with its place among the course's."""
        verdict = super().judge(*objects, **options)
        if verdict.outcome == PASSED:
            verdict = replace(verdict, detail=place_of(objects[0]))
        return verdict

    def trial(self, attempt):
        found = trained(attempt)
        apart = max(b - a for a, b in itertools.pairwise([0, *found.met, STEPS]))
        facts = {LAST: found.sent, MEET: STEPS in found.met, OFTEN: apart <= LONGEST, ONE: True,
                 "the loss at the end": found.loss}
        weights = [torch.empty_like(found.weights) for _ in range(dist.get_world_size())]
        dist.all_gather(weights, found.weights)
        facts[ONE] = all(torch.equal(each, weights[0]) for each in weights)
        for rank in (0, dist.get_world_size() - 1):
            changed = trained(attempt, changed=rank)
            facts[f"that rank {rank}'s samples change the weights"] = not torch.equal(
                changed.weights, found.weights)
        return facts | with_one_gradient(attempt) | {"calls": found.calls}

    def expected(self, world_size):
        size = parameters_to_vector(digits_classifier().parameters()).numel()
        synchronous = 2 * (world_size - 1) / world_size * 4 * size
        return {LAST: AtMost(synchronous / BUDGET,
                             f"a synchronous step sends {synchronous:,.0f}, and the budget is 1/"
                             f"{BUDGET} of that, on average over all steps"),
                MEET: True, OFTEN: True, ONE: True, ALIKE: True, ADD_UP: True,
                **{f"that rank {rank}'s samples change the weights": True
                   for rank in (0, world_size - 1)},
                "the loss at the end": AtMost(MOST_LOSS, "an untrained model has 2.3",
                                              exact=False)}

    def described(self, difference, got, world_size):
        """What the attempt sent, by kind of message."""
        words = super().described(difference, got, world_size)
        calls = got[difference.rank]["calls"]
        return "\n".join([words, f"In {STEPS} steps this rank called", *calls]) if calls else words

    hints = (
        "Two ways to save multiply: meet every H steps, and send fewer bytes at a meeting. What "
        "the budget leaves for one element at H = 16 is less than a byte and a half.",
        "After the optimizer's step, each H-th time: the change of the weights since the last "
        "meeting, plus what this rank kept. Send it in 8 bits as `int8_average` does, and "
        "keep the difference to what was sent.",
        "`unit` is the largest magnitude over 127 // N, by an all-reduce with `MAX`; `numbers` are "
        "int8; `kept = change − numbers * unit` before the all-reduce of `numbers`; all ranks go "
        "on from anchor + mean. And meet once more after the last step.",
    )
    slips = (
        Slip("After the last step your ranks do not meet, so each ends with weights of its own. "
             "`steps` says which step is the last.", {" or self.done == self.steps": ""}),
        Slip(f"Your ranks meet more seldom than every {LONGEST} steps. Meet in time, and send "
             "fewer bits at each meeting, or fewer numbers.",
             {"self.done % 16": "self.done % 64"}),
        Slip("Your ranks meet after the last step, and each goes on from numbers of its own. What "
             "changes the weights must be the same on all: the sum of what all sent, in one unit, "
             "added to one anchor.",
             {"dist.all_reduce(numbers)": "dist.all_reduce(numbers.clone())",
              "numbers * unit / world_size": "numbers * unit"},
             {"dist.all_reduce(unit, op=dist.ReduceOp.MAX)": "pass"}),
        Slip("What you send wraps around in the sum: 8 bits hold no more than 127, and the numbers "
             "of all ranks are added up. Each rank's may reach 127 // N.",
             {"(127 // world_size)": "127"}),
        Slip("What you do not send is lost: an element whose change is too small at each meeting "
             "never moves. Keep the rest, and add it to the next change.",
             {"self.kept = change - numbers * unit": "pass"}),
        Slip("The optimizer never steps: your `step()` is called in place of `optimizer.step()`.",
             {"self.optimizer.step()": "pass"}),
    )


class Run:
    """What came of one training on this rank; ``met``: the steps in which it communicated."""

    def __init__(self, weights, loss, log, met):
        self.weights, self.loss, self.met = weights, loss, met
        self.sent = sum(map(sent_bytes, log.calls)) / STEPS
        kinds: dict[str, list[float]] = {}
        for call in log.calls:
            kinds.setdefault(f"{call.operation} of {call.dtype} {list(call.shape)}", []).append(
                sent_bytes(call))
        self.calls = [f"  {len(sent):4} × {kind}, which sends {sum(sent) / STEPS:,.1f} bytes a step"
                      for kind, sent in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))]


def trained(attempt, changed=None) -> Run:
    """A short training on digits; ``changed``: the rank that gets other samples."""
    digits, rank = load_digits(), dist.get_rank()
    model = digits_classifier(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    scheme = attempt(model, optimizer, STEPS)
    generator = torch.Generator().manual_seed(rank + 100 * (rank == changed))
    met = []
    with CallLog() as log:
        for step in range(1, STEPS + 1):
            before = len(log.calls)
            mine = torch.randint(len(digits.train_labels), (LOCAL_BATCH,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(digits.train_images[mine]), digits.train_labels[mine]).backward()
            scheme.step()
            if len(log.calls) > before:
                met.append(step)
    with torch.no_grad():
        loss = F.cross_entropy(model(digits.train_images), digits.train_labels).item()
    weights = parameters_to_vector(model.parameters()).detach()
    return Run(weights, loss, log, met)


def with_one_gradient(attempt) -> dict[str, bool]:
    """What a scheme makes of a gradient that is the same in all steps and on all ranks.

    The first element of each parameter is 1 in it, and all others are small.
    """
    model = digits_classifier(0)
    parameters = list(model.parameters())
    start = parameters_to_vector(parameters).detach().clone()
    gradients = [torch.full_like(parameter, SMALL) for parameter in parameters]
    for gradient in gradients:
        gradient.view(-1)[0] = 1.0
    rate = 0.01
    scheme = attempt(model, torch.optim.SGD(parameters, lr=rate), LONG)
    for _ in range(LONG):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        scheme.step()
    down = start - parameters_to_vector(parameters).detach()
    large = parameters_to_vector(gradients) == 1
    way = down[~large].mean().item() / (LONG * rate * SMALL)
    return {ALIKE: bool((down[large] > 0).all()), ADD_UP: way >= ARRIVES}


# The table


def place_of(attempt) -> str:
    """The reader's scheme among the course's, by its loss on the language model."""
    if (chapters := course.folder()) is None:
        return "The course's notebooks are not beside the package, so there is no table."
    best = at_the_best_rates(json.loads((chapters / "data" / "unsent.json").read_text())["runs"])
    rate = getattr(attempt, "rate", Scheme.rate)
    try:
        own = run(in_full, RANKS, attempt, rate, backend="gloo", timeout=300)[0]
    except RankError as error:
        return f"On the language model it failed, so it has no place in the table:\n{error}"
    rows = [(row["loss"], row["sent"], row["rate"], row["scheme"])
            for runs in best.values() for row in runs if row["seed"] == 0]
    rows.append((own.loss, own.sent, rate, "yours  ←"))
    spread = max(max(row["loss"] for row in runs) - min(row["loss"] for row in runs)
                 for runs in best.values())
    return "\n".join([
        f"Held-out loss after {LANGUAGE.steps} steps on {RANKS} ranks, seed 0; the course's at the "
        "best rate of their search:",
        f"{'loss':>6}  {'bytes a step':>12}  {'rate':>8}  scheme",
        *(f"{loss:6.3f}  {sent:12,.0f}  {rate:8g}  {scheme}"
          for loss, sent, rate, scheme in sorted(rows)),
        f"Seeds of one scheme differ by up to {spread:.2f}: smaller differences mean nothing. And "
        "these are toys: their order says little about large models and long runs."])


def in_full(attempt, rate):
    """The whole training of the language model with the reader's scheme."""
    return train(LANGUAGE, lambda model, optimizer: attempt(model, optimizer, LANGUAGE.steps),
                 rate)


def at_the_best_rates(rows) -> dict[str, list[dict]]:
    """By scheme of the recorded search, the runs of all seeds at the rate with the best median."""
    found: dict[str, dict[float, list[dict]]] = {}
    for row in rows:
        if row["task"] == "language":
            found.setdefault(row["scheme"], {}).setdefault(row["rate"], []).append(row)
    return {scheme: min(by_rate.values(), key=lambda rows: statistics.median(
        row["loss"] for row in rows)) for scheme, by_rate in found.items()}

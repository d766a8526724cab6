"""Chapter 13's drills: ranks that meet rarely, and send only a part of what they have to say.

The job trains digits. Each rank takes a few steps alone. Then the ranks meet: each sends the
largest elements of its change since the last meeting and keeps the rest, the ranks average what was
sent, and an outer optimizer with Nesterov momentum takes a step with the average. One of these
parts has a fault. The instruments follow what a rank had, sent and kept, what came out of a
meeting, and of which meetings' averages a step is made.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import run, show
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, draw, instrument, print_table
from dplab.workloads.digits import TRAIN_SIZE, digits_classifier, load_digits

NEAR = 0.02  # relative: far above rounding, far below what a fault changes
MEETINGS, LOCAL_STEPS, LOCAL_BATCH = 12, 6, 16
LOOKED_BACK = 3  # how many averages an outer step is taken apart into


@dataclass(frozen=True)
class Settings:
    """``k``: elements that a rank sends at a meeting; ``rate``: of the ranks' own steps."""

    k: int
    rate: float
    seed: int


# The parts


def choose(change, kept, k):
    whole = change + kept
    places = whole.abs().topk(k).indices
    values = whole[places]
    kept.copy_(whole)
    kept[places] = 0
    return values, places


def average(values, places, size):
    world_size = dist.get_world_size()
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    all_places = [torch.empty_like(places) for _ in range(world_size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_places, places)
    total = torch.zeros(size)
    for arrived, at in zip(all_values, all_places, strict=True):
        total[at] += arrived
    return total / world_size


def outer_step(anchor, velocity, mean):
    velocity.mul_(0.9).add_(mean)
    return anchor + 0.7 * (mean + 0.9 * velocity)


@dataclass(frozen=True)
class Parts:
    """What `train` is made of."""

    choose: Callable = choose
    average: Callable = average
    outer_step: Callable = outer_step


# The loop


@dataclass
class Meeting:
    """What one rank saw of a meeting.

    ``had``, ``sent``, ``kept``, ``missing``: the norms of what there was to send, of what was sent,
    of what stayed for the next meeting, and of what is in neither. ``times``: how often the mean of
    what the ranks sent is in what the meeting gave this rank; ``wrong``: the norm of the remainder,
    relative to that mean. ``shares``: how often this meeting's mean, and those of the meetings
    before, are in the outer step. ``apart``: how far this rank's weights are from rank 0's.
    """

    loss: float
    had: float
    sent: float
    kept: float
    missing: float
    times: float
    wrong: float
    shares: list[float] = field(default_factory=list)
    apart: float = 0.0


def train(parts: Parts, settings: Settings) -> list[Meeting]:
    """Trains on each rank until the last meeting."""
    digits, rank = load_digits(), dist.get_rank()
    model = digits_classifier(settings.seed)
    anchor = parameters_to_vector(model.parameters()).detach()
    kept, velocity = torch.zeros_like(anchor), torch.zeros_like(anchor)
    generator = torch.Generator().manual_seed(settings.seed + rank)
    meetings: list[Meeting] = []
    means: list[torch.Tensor] = []
    for _ in range(MEETINGS):
        vector_to_parameters(anchor.clone(), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
        for _ in range(LOCAL_STEPS):
            mine = torch.randint(TRAIN_SIZE, (LOCAL_BATCH,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(digits.train_images[mine]), digits.train_labels[mine]).backward()
            optimizer.step()
        change = parameters_to_vector(model.parameters()).detach() - anchor
        had = change + kept
        values, places = parts.choose(change, kept, settings.k)
        sent = torch.zeros_like(had).index_put((places,), values)
        mean = parts.average(values, places, len(had))
        after = parts.outer_step(anchor, velocity, mean)

        of_all = reduced(sent) / dist.get_world_size()
        times = (mean @ of_all / of_all.square().sum()).item()
        means.append(mean.clone())
        meeting = Meeting(
            loss=0.0, had=had.norm().item(), sent=sent.norm().item(), kept=kept.norm().item(),
            missing=(had - sent - kept).norm().item(), times=times,
            wrong=((mean - times * of_all).norm() / of_all.norm()).item(),
            shares=taken_apart(after - anchor, means))
        anchor = after
        first = anchor.clone()
        dist.broadcast(first, src=0)
        meeting.apart = (anchor - first).norm().item()
        with torch.no_grad():
            vector_to_parameters(anchor.clone(), model.parameters())
            loss = F.cross_entropy(model(digits.train_images), digits.train_labels)
        meeting.loss = reduced(loss).item() / dist.get_world_size()
        meetings.append(meeting)
    return meetings


def reduced(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def taken_apart(step, means) -> list[float]:
    """How often each mean is in the step, by least squares, the latest first."""
    basis = torch.stack(means[::-1]).double().T
    found = torch.linalg.lstsq(basis, step.double()[:, None], driver="gelsd").solution[:, 0]
    return found.tolist()[:LOOKED_BACK]


# Readings


@dataclass
class Readings:
    """What the ranks of a job saw at each meeting, and what they did before the job fell ill."""

    ranks: list[list[Meeting]]
    before: list[list[Meeting]]

    @property
    def third(self) -> Meeting:
        """Rank 0's third meeting, the first with two others before it."""
        return self.ranks[0][2]

    def steps_like(self, shares) -> bool:
        """Whether each outer step is made of the latest means as often as this says."""
        return all(abs(found - wanted) < NEAR for meetings in self.ranks
                   for meeting in meetings[2:]
                   for found, wanted in zip(meeting.shares, shares, strict=True))

    def said_of_steps(self) -> str:
        now, last, earlier = self.third.shares
        return (f"Rank 0's third outer step holds {now:.2f} times the mean of its own meeting, "
                f"{last:.2f} times that of the second, and {earlier:.2f} times that of the first.")

    def said_of_account(self) -> str:
        meeting = self.third
        return (f"At the third meeting rank 0 had {meeting.had:.2f}, sent {meeting.sent:.2f} and "
                f"kept {meeting.kept:.2f}, as norms; {meeting.missing:.2f} is in neither.")

    def all_of(self, holds) -> bool:
        return all(holds(meeting) for meetings in self.ranks for meeting in meetings)


# Suspects


def dropped(readings):
    return (readings.all_of(lambda each: each.kept < NEAR * each.missing),
            readings.said_of_account())


def sent_twice(readings):
    return (readings.all_of(lambda each: abs(each.kept / each.had - 1) < NEAR),
            readings.said_of_account())


def undivided(readings):
    ranks, times = len(readings.ranks), readings.third.times
    return (ranks > 1 and readings.all_of(lambda each: abs(each.times / ranks - 1) < NEAR),
            f"What comes out of the third meeting of {ranks} ranks is {times:.2f} times the mean "
            "of what they sent.")


def elsewhere(readings):
    meeting = readings.ranks[-1][2]
    return (meeting.wrong > NEAR and meeting.apart > 0,
            f"On the last rank, what comes out of the third meeting is off the mean of what was "
            f"sent by {meeting.wrong:.2f} of it, and its weights are {meeting.apart:.2g} from rank "
            "0's.")


def no_memory(readings):
    _, *earlier = readings.third.shares
    return all(abs(each) < NEAR for each in earlier), readings.said_of_steps()


def not_ahead(readings):
    return readings.steps_like([0.7, 0.63, 0.567]), readings.said_of_steps()


SUSPECTS = (
    Suspect("discarded remainder", "What a rank does not send is lost.", "accounts", dropped),
    Suspect("repeated parcel", "What was sent stays, and is sent again.", "accounts", sent_twice),
    Suspect("undivided total", "The ranks' messages are summed up, not averaged.", "outcomes",
            undivided),
    Suspect("misplaced arrivals", "Values are put where this rank's own would go.", "outcomes",
            elsewhere),
    Suspect("amnesic optimizer", "The outer momentum begins anew at each meeting.", "steps",
            no_memory),
    Suspect("plain heavy-ball", "The outer momentum is not Nesterov's.", "steps", not_ahead),
)

_SAME = "Since the clean-up of last week"
CASES = (
    Case("a", "discarded remainder", choose, (
        Fault({"kept.copy_(whole)": "kept.zero_()"},
              f"{_SAME} the job on {{n}} ranks sends as many bytes as ever, nothing crashes, and "
              "the loss comes down more slowly.", {"slower"}),
        Fault({"kept.copy_(whole)": "kept = whole.clone()"},
              f"{_SAME} the loss of our {{n}} ranks is behind. We only made a function shorter.",
              {"slower"}),)),
    Case("b", "repeated parcel", choose, (
        Fault({"kept[places] = 0": "pass"},
              "On {n} ranks the loss does not do what it did before the clean-up. The bytes are "
              "the same.", {"apart"}),)),
    Case("c", "undivided total", average, (
        Fault({"total / world_size": "total"},
              "With {n} ranks the curve is another one than before the clean-up, from the first "
              "meeting on.", {"apart"}),)),
    Case("d", "misplaced arrivals", average, (
        Fault({"total[at]": "total[places]"},
              "With {n} ranks the curve is another one than before the clean-up. The log of what "
              "each rank sends is fine.", {"apart"}),)),
    Case("e", "amnesic optimizer", outer_step, (
        Fault({"velocity.mul_(0.9).add_(mean)": "velocity = mean.clone()"},
              f"{_SAME} the first loss on {{n}} ranks is right to the last digit, and the later "
              "ones are higher.", {"slower", "first is right"}),)),
    Case("f", "plain heavy-ball", outer_step, (
        Fault({"(mean + 0.9 * velocity)": "velocity"},
              f"{_SAME} the loss of our {{n}} ranks is behind. Every rank still sends what it "
              "should, and keeps what it should.", {"slower"}),)),
)


class RareMeetings(SickJob):
    """Ranks whose meetings do something else than they should."""

    chapter = 13
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        return Settings(chances.randrange(150, 200), chances.uniform(0.3, 0.36),
                        chances.randrange(1000, 1_000_000))

    def _description(self):
        return (f"{self._world_size} ranks train digits. Each takes {LOCAL_STEPS} steps alone; "
                f"then they meet. A rank sends the {self._settings.k} largest elements of its "
                "change and of what it kept at earlier meetings, and keeps the others. Nesterov's "
                "outer momentum, 0.9, takes a step of rate 0.7 with the mean: it holds 1.33 times "
                "this meeting's mean, 0.57 times the last one's, 0.51 times the one's before.")

    def _run(self, part):
        parts = replace(Parts(), **{self._part_name: part})
        return Readings(run(train, self._world_size, parts, self._settings, backend="gloo"),
                        run(train, self._world_size, Parts(), self._settings, backend="gloo"))

    @instrument
    def losses(self) -> None:
        """The loss after each meeting, now and before the clean-up."""
        curves = {"now": [each.loss for each in self._readings.ranks[0]],
                  "before": [each.loss for each in self._readings.before[0]]}
        draw(show.loss_curves, curves, title="Loss on all digits after each meeting", note="")
        print_table(["meeting", *range(1, MEETINGS + 1)], *(
            [name, *(f"{loss:.3f}" for loss in losses)] for name, losses in curves.items()))

    @instrument
    def accounts(self) -> None:
        """What each rank had, sent and kept at the first meetings, and what is in neither."""
        for number in range(LOOKED_BACK):
            print_table([f"meeting {number + 1}, norms", "had", "sent", "kept", "in neither"], *(
                [f"rank {rank}", *(f"{each:.3f}" for each in (
                    meetings[number].had, meetings[number].sent, meetings[number].kept,
                    meetings[number].missing))]
                for rank, meetings in enumerate(self._readings.ranks)))

    @instrument
    def outcomes(self) -> None:
        """What came out of a meeting, beside the mean of what the ranks sent."""
        for number in range(LOOKED_BACK):
            print_table([f"meeting {number + 1}", "times the mean", "off it", "from rank 0"], *(
                [f"rank {rank}", *(f"{each:.2f}" for each in (
                    meetings[number].times, meetings[number].wrong, meetings[number].apart))]
                for rank, meetings in enumerate(self._readings.ranks)))

    @instrument
    def steps(self) -> None:
        """Of which meetings' means an outer step is made."""
        for number in range(LOOKED_BACK):
            print_table([f"step {number + 1} holds", *(
                f"of meeting {number + 1 - back}" for back in range(number + 1))], *(
                [f"rank {rank}", *(f"{each:.2f}" for each in meetings[number].shares)]
                for rank, meetings in enumerate(self._readings.ranks)))

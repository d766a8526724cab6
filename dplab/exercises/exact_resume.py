"""A checkpoint from which a run goes on as if it had never stopped, equal to the last bit."""

import os
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab import RankError
from dplab.checks import observe
from dplab.checks.compare import first_difference
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import reduced, seeded
from dplab.spawn.parent.output import headed


class Checkpoint:
    def __init__(self, path):
        # Ranks differ in their buffers and random numbers, so each has a file of its own.
        self.file = f"{path}.{dist.get_rank()}"

    def save(self, step, model, optimizer):
        torch.save({"step": step, "model": model.state_dict(), "random": torch.get_rng_state(),
                    "optimizer": optimizer.state_dict()}, self.file)

    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        return saved["step"]


STOP, END = 2, 3  # the steps before which the first job saves, and at which both end
KINDS = ("weights", "buffers", "momenta", "learning rates", "random numbers", "training modes")
SAVED = "that `save` leaves this rank's {} as they are"
LOADED = "whose {} of the stop this rank has after `load`"
STEP, GOES_ON = "the step that `load` returns", "that the resumed run goes on as the other one did"


def first_job(folder, attempt, pause=0.0):
    """Trains, saves and goes on. Then it writes down what the second job is compared with.

    With a pause between them, rank 0 is the last to save.
    """
    os.makedirs(f"{folder}/empty", exist_ok=True)
    model, optimizer = new_job(seed=0)
    train(model, optimizer, range(STOP))
    at_stop = state_of(model, optimizer)
    time.sleep(pause * (dist.get_world_size() - 1 - dist.get_rank()))
    attempt(f"{folder}/empty/checkpoint").save(STOP, model, optimizer)
    saved = state_of(model, optimizer)
    dist.barrier()
    losses = train(model, optimizer, range(STOP, END))
    torch.save((at_stop, losses, state_of(model, optimizer)), f"{folder}/{dist.get_rank()}")
    return {SAVED.format(kind): torch.equal(at_stop[kind], saved[kind]) for kind in KINDS}


def second_job(folder, attempt):
    """Begins otherwise than the first, loads, and goes on where all ranks have the state back."""
    at_stops, losses, at_ends = zip(*(torch.load(f"{folder}/{rank}")
                                      for rank in range(dist.get_world_size())), strict=True)
    model, optimizer = new_job(seed=100)
    step = attempt(f"{folder}/empty/checkpoint").load(model, optimizer)
    found = state_of(model, optimizer)
    facts = {LOADED.format(kind): whose(found[kind], [each[kind] for each in at_stops])
             for kind in KINDS}
    ready = type(step) is int and step == STOP and {*facts.values()} == {"its own"}
    goes_on = True  # what follows from a wrong state is no second fault
    if reduced(torch.tensor(int(ready)), op=dist.ReduceOp.MIN):
        rank = dist.get_rank()
        goes_on = train(model, optimizer, range(STOP, END)) == losses[rank]
        found = state_of(model, optimizer)
        goes_on &= all(torch.equal(found[kind], at_ends[rank][kind]) for kind in KINDS)
    return {STEP: step, **facts, GOES_ON: goes_on}


class ExactResume(Exercise):
    number = "4.6"
    title = "A resume that is exact"
    minutes = 15
    world_sizes = (2, 3)
    seconds = 10.0
    communicates = False
    solution = Checkpoint

    def trial(self, attempt):
        """Both jobs on the same ranks: for known mistakes, which keep nothing but files."""
        with tempfile.TemporaryDirectory() as folder:
            names = [folder]
            dist.broadcast_object_list(names, src=0)
            facts = first_job(names[0], attempt)
            dist.barrier()
            facts |= second_job(names[0], attempt)
            dist.barrier()
        return facts

    def observe(self, attempt, world_size, *, quiet=False):
        """Each job on ranks of its own: nothing but files comes from the first to the second."""
        facts = [{} for _ in range(world_size)]
        with (tempfile.TemporaryDirectory() as folder,
              headed(f"Your code printed, on {world_size} ranks:")):
            for job in (partial(first_job, folder, pause=0.02), partial(second_job, folder)):
                got = observe.alone(job, attempt, world_size, seconds=self._limit, quiet=quiet)
                if isinstance(got, RankError):
                    return got
                facts = [before | after for before, after in zip(facts, got, strict=True)]
        return facts

    def expected(self, world_size):
        return {**{SAVED.format(kind): True for kind in KINDS}, STEP: STOP,
                **{LOADED.format(kind): "its own" for kind in KINDS}, GOES_ON: True}

    def explanation(self, attempt, got, world_size):
        """Beside the known mistakes, one that shows only where the second job has new processes."""
        if not (isinstance(got, RankError) and got.kind == "stuck"):
            on_the_same = super().observe(attempt, world_size, quiet=True)
            if isinstance(on_the_same, list) and not first_difference(
                    self.expected_of_all(world_size), on_the_same, self.tolerance):
                return ("This is right only where the processes that saved also load. A new job "
                        "has new ones, and what the old ones kept in a class or in a variable is "
                        "gone with them: all that `load` gives back has to stand in files.")
        return super().explanation(attempt, got, world_size)

    hints = (
        "Write down everything that a step reads. Which of it has changed since the start of the "
        "job? And which of that differs from rank to rank?",
        "The optimizer has momenta and a learning rate. Dropout draws from torch's generator, "
        "which each rank has its own of. BatchNorm has buffers, which each rank computes from its "
        "own samples.",
        "Let each rank write a file of its own: f\"{path}.{dist.get_rank()}\". In it: `step`, "
        "`model.state_dict()` (which has all buffers of this model), `optimizer.state_dict()`, "
        "`torch.get_rng_state()`. `load` gives all of it back, the last with "
        "`torch.set_rng_state`, and returns the step.",
    )
    slips = (
        Slip("You give back the model and nothing else: the optimizer begins without momenta, and "
             "dropout draws other numbers.",
             {'optimizer.load_state_dict(saved["optimizer"])': "",
              'torch.set_rng_state(saved["random"])': ""}),
        Slip("The optimizer begins anew: its momenta and its learning rate are not those of the "
             "stop. Save and load `optimizer.state_dict()`.",
             {'optimizer.load_state_dict(saved["optimizer"])': ""}),
        Slip("The model and the optimizer of the caller are as they were before `load`. What is "
             "assigned to their names in `load` is something else: change them in place, with "
             "`load_state_dict`.",
             {'model.load_state_dict(saved["model"])': "",
              'optimizer.load_state_dict(saved["optimizer"])': ""}),
        Slip("With `assign=True` the model gets other parameters. The optimizer still has the old "
             "ones, and changes those: the model stands still. Load without it, in place.",
             {'saved["model"])': 'saved["model"], assign=True)'}),
        Slip("The momenta are there, but the learning rate is that of a new optimizer. It stands "
             "in the `param_groups` of `optimizer.state_dict()`: save that whole.",
             {'saved["optimizer"])':
              'optimizer.state_dict() | {"state": saved["optimizer"]["state"]})'}),
        Slip("Dropout draws other numbers than the run that went on. A seed does not help: the "
             "generator has to go on where it stopped. Save `torch.get_rng_state()` on each rank, "
             "and set it again.", {'torch.set_rng_state(saved["random"])': ""}),
        Slip("`load` does not return the step that `save` was given. With another one, the run "
             "leaves out batches, or trains on some again; with None, it does not know where to go "
             "on.", *({'return saved["step"]': end} for end in ("", "return 0", "return STOP + 1",
                                                                "return STOP - 1"))),
        Slip("The parameters are there, the buffers are not: BatchNorm's running statistics begin "
             "anew. `state_dict()` has both.",
             {'model.load_state_dict(saved["model"])':
              "for name, parameter in model.named_parameters():\n"
              '    parameter.data.copy_(saved["model"][name])'}),
        Slip("All ranks go on with rank 0's buffers and random numbers. (Does only one file "
             "remain, or does rank 0 write its own state alone?) Ranks differ in both: each has to "
             "save its own.",
             {'f"{path}.{dist.get_rank()}"': "path",
              "torch.save(": "if dist.get_rank() == 0:\n    torch.save("}),
        Slip("All ranks go on with rank 0's buffers, and with random numbers that are nobody's of "
             "the stop. Ranks differ in their buffers and random numbers: each has to save its "
             "own.",
             {'f"{path}.{dist.get_rank()}"': "path",
              "torch.save(": "if dist.get_rank() == 0:\n    torch.save(",
              'torch.set_rng_state(saved["random"])': ""}),
        Slip("All ranks go on with rank 0's buffers. Each rank computes its running statistics "
             "from its own samples: save them on each rank.",
             {'model.load_state_dict(saved["model"])':
              'model.load_state_dict(saved["model"])\nfor buffer in model.buffers():\n'
              "    dist.broadcast(buffer, src=0)"}),
        Slip("`save` overwrites the other ranks' buffers with rank 0's, so it changes the run that "
             "goes on, and loses their statistics. That is for a model which you save for use. A "
             "run that is to go on needs each rank's own.",
             {"torch.save(": "for buffer in model.buffers():\n    dist.broadcast(buffer, src=0)\n"
                             "torch.save("}),
        Slip("All ranks go on with rank 0's random numbers, so they drop the same units. Each rank "
             "has a generator of its own: save its state on each rank.",
             {"torch.set_rng_state(":
              'dist.broadcast(saved["random"], src=0)\ntorch.set_rng_state('}),
        Slip("Only rank 0 has its optimizer and its random numbers back. Every rank takes the "
             "steps, so every rank loads.",
             {"optimizer.load_state_dict(": 'if dist.get_rank() > 0:\n    return saved["step"]\n'
                                            "optimizer.load_state_dict("}),
        Slip("`save` sets a seed, or draws numbers, so it changes the run that goes on after it. "
             "Only read the generator's state: `torch.get_rng_state()`.",
             {"torch.save(": "torch.manual_seed(step)\ntorch.save("}),
    )


def new_job(seed):
    """A model and its optimizer; the ranks have equal weights, and random numbers of their own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 10))
    torch.manual_seed(seed + 1 + dist.get_rank())
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(model, optimizer, steps):
    """Trains with a falling learning rate; the losses of this rank."""
    losses = []
    for step in steps:
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        samples, labels = seeded(f"step {step}", 16, 16)[mine], (torch.arange(16) % 10)[mine]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(samples), labels)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        total = reduced(parameters_to_vector(gradients))
        vector_to_parameters(total / dist.get_world_size(), gradients)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        losses.append(loss.item())
    return losses


def state_of(model, optimizer):
    """A copy of all that a step reads, a tensor for each kind."""
    momenta = [optimizer.state[each].get("momentum_buffer", torch.zeros_like(each))
               for each in model.parameters()]
    tensors = (parameters_to_vector(model.parameters()).detach().clone(),
               torch.cat([each.flatten().double() for each in model.buffers()]),
               parameters_to_vector(momenta).detach().clone(),
               torch.tensor([group["lr"] for group in optimizer.param_groups]),
               torch.get_rng_state(),
               torch.tensor([module.training for module in model.modules()]))
    return dict(zip(KINDS, tensors, strict=True))


def whose(found, of_ranks):
    """Of all ranks' tensors, this rank's first: whose is equal to the one that was found."""
    if torch.equal(found, of_ranks[dist.get_rank()]):
        return "its own"
    others = [rank for rank, tensor in enumerate(of_ranks) if torch.equal(found, tensor)]
    return f"rank {others[0]}'s" if others else "nobody's"

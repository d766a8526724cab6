"""Exercise 4.5: a resume that is exact."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab.checks.exercise import Exercise, Mistake
from dplab.exercises.average_gradients import unpack
from dplab.exercises.broadcast_weights import broadcast_weights
from dplab.workloads.digits import load_digits


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


class WeightsAlone(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        return saved["step"]


class WithoutOptimizer(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        torch.set_rng_state(saved["random"])
        return saved["step"]


class WithoutRandom(Checkpoint):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]


class WithoutStep(Checkpoint):
    def load(self, model, optimizer):
        super().load(model, optimizer)


class FromTheBeginning(Checkpoint):
    def load(self, model, optimizer):
        super().load(model, optimizer)
        return 0


class OneStepLate(Checkpoint):
    def load(self, model, optimizer):
        return super().load(model, optimizer) + 1


class ParametersAlone(Checkpoint):
    def save(self, step, model, optimizer):
        torch.save([step, dict(model.named_parameters()), optimizer.state_dict(),
                    torch.get_rng_state()], self.file)

    def load(self, model, optimizer):
        step, parameters, state, random = torch.load(self.file)
        model.load_state_dict(parameters, strict=False)
        optimizer.load_state_dict(state)
        torch.set_rng_state(random)
        return step


class MomentaAlone(Checkpoint):
    def save(self, step, model, optimizer):
        torch.save([step, model.state_dict(), optimizer.state_dict()["state"],
                    torch.get_rng_state()], self.file)

    def load(self, model, optimizer):
        step, tensors, state, random = torch.load(self.file)
        model.load_state_dict(tensors)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        torch.set_rng_state(random)
        return step


class Rank0ForAll(Checkpoint):
    def __init__(self, path):
        self.file = path

    def save(self, step, model, optimizer):
        if dist.get_rank() == 0:
            super().save(step, model, optimizer)
        dist.barrier()


class Rank0ForAllWithoutRandom(Rank0ForAll):
    def load(self, model, optimizer):
        saved = torch.load(self.file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]


class Rank0sBuffers(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        return step


class BroadcastsBuffers(Checkpoint):
    def save(self, step, model, optimizer):
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        super().save(step, model, optimizer)


class Rank0sRandom(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        random = torch.get_rng_state()
        dist.broadcast(random, src=0)
        torch.set_rng_state(random)
        return step


class OnlyRank0Loads(Checkpoint):
    def load(self, model, optimizer):
        step = torch.load(self.file)["step"]
        if dist.get_rank() == 0:
            super().load(model, optimizer)
        broadcast_weights(model)
        return step


class SeedsAnew(Checkpoint):
    def save(self, step, model, optimizer):
        torch.manual_seed(step)
        super().save(step, model, optimizer)


class SeedsAfterLoad(Checkpoint):
    def load(self, model, optimizer):
        step = super().load(model, optimizer)
        torch.manual_seed(step)
        return step

_OTHER_RANDOM = ("Dropout draws other numbers than the run that went on. A seed does not help: the "
                 "generator has to go on where it stopped. Save `torch.get_rng_state()` on each "
                 "rank, and set it again.")

_FOR_ALL = ("All ranks go on with rank 0's buffers and random numbers. (Does only one file remain, "
            "or does rank 0 write its own state alone?) Ranks differ in both: each has to save its "
            "own.")


class ExactResume(Exercise):
    number = "4.5"
    title = "A resume that is exact"
    minutes = 15
    seconds = 10.0
    tolerance = 0.0  # equal means ==
    communicates = False
    stop, steps = 2, 4
    hints = (
        "Write down everything that a step reads. Which of it has changed since the start of the "
        "job? And which of that differs from rank to rank?",
        "The optimizer has momenta and a learning rate. Dropout draws from torch's generator, "
        "which each rank has its own of. BatchNorm has buffers, which each rank computes from its "
        "own samples.",
        "Let each rank write a file of its own: f\"{path}.{dist.get_rank()}\". In it: `step`, "
        "`model.state_dict()`, `optimizer.state_dict()`, `torch.get_rng_state()`. `load` gives all "
        "of it back, the last with `torch.set_rng_state`, and returns the step.",
    )
    solution = Checkpoint
    mistakes = (
        Mistake(WeightsAlone, "You give back the model and nothing else: the optimizer begins "
                "without momenta, and dropout draws other numbers."),
        Mistake(WithoutOptimizer, "The optimizer begins anew: its momenta and its learning rate "
                "are not those of the stop. Save and load `optimizer.state_dict()`."),
        Mistake(MomentaAlone, "The momenta are there, but the learning rate is that of a new "
                "optimizer. It stands in the `param_groups` of `optimizer.state_dict()`: save that "
                "whole."),
        Mistake(WithoutRandom, _OTHER_RANDOM),
        Mistake(WithoutStep, "`load` returns None: return the step that was saved, so that the "
                "loop knows where to go on."),
        Mistake(FromTheBeginning, "`load` returns 0, so the run trains on its first batches again. "
                "Return the step that was saved."),
        Mistake(OneStepLate, "`load` returns the step after the one that was saved, so one batch "
                "is left out. Return the number that `save` was given."),
        Mistake(ParametersAlone, "The parameters are there, the buffers are not: BatchNorm's "
                "running statistics begin anew. `state_dict()` has both."),
        Mistake(Rank0ForAll, _FOR_ALL),
        Mistake(Rank0ForAllWithoutRandom, "Rank 0 saves its own state alone, and no random "
                "numbers. Ranks differ in their buffers and random numbers: each has to save its "
                "own."),
        Mistake(Rank0sBuffers, "All ranks go on with rank 0's buffers. Each rank computes its "
                "running statistics from its own samples: save them on each rank."),
        Mistake(BroadcastsBuffers, "`save` overwrites the other ranks' buffers with rank 0's, so "
                "it changes the run that goes on, and loses their statistics. That is for a model "
                "which you save for use. A run that is to go on needs each rank's own."),
        Mistake(Rank0sRandom, "All ranks go on with rank 0's random numbers, so they drop the same "
                "units. Each rank has a generator of its own: save its state on each rank."),
        Mistake(OnlyRank0Loads, "Only rank 0 has its optimizer and its random numbers back. Every "
                "rank takes the steps, so every rank loads."),
        Mistake(SeedsAnew, "`save` sets a seed, so it changes the run that goes on after it. Only "
                "read the generator's state: `torch.get_rng_state()`."),
        Mistake(SeedsAfterLoad, _OTHER_RANDOM),
    )

    def prepare(self):
        digits = load_digits()
        return digits.train_images[:64], digits.train_labels[:64]

    def trial(self, attempt):
        with tempfile.TemporaryDirectory() as folder:
            names = [folder]
            dist.broadcast_object_list(names, src=0)
            facts = self._stop_and_resume(attempt, os.path.join(names[0], "checkpoint"))
            dist.barrier()
        return facts

    def _stop_and_resume(self, attempt, path):
        model, optimizer = self._new_job(seed=0)
        self._train(model, optimizer, range(self.stop))
        at_stop = _state_of(model, optimizer)
        time.sleep(0.05 * (dist.get_world_size() - dist.get_rank()))  # rank 0 saves last
        attempt(path).save(self.stop, model, optimizer)
        undisturbed = _same(at_stop, _state_of(model, optimizer))
        dist.barrier()
        losses = self._train(model, optimizer, range(self.stop, self.steps))
        at_end = _state_of(model, optimizer)

        model, optimizer = self._new_job(seed=100)
        step = attempt(path).load(model, optimizer)
        found = _state_of(model, optimizer)
        goes_on = step == self.stop and type(step) is int
        resumed = self._train(model, optimizer, range(step, self.steps)) if goes_on else []
        return {
            "the step that `load` returns": step,
            **{f"that this rank's {what} after `load` are those of the stop":
               torch.equal(at_stop[what], found[what]) for what in at_stop},
            "that `save` changes nothing": undisturbed,
            "that each loss of the resumed run is that of the run which went on":
                resumed == losses,
            "that the resumed run ends where the other one did":
                goes_on and _same(at_end, _state_of(model, optimizer))}

    def expected(self, world_size):
        return {
            "the step that `load` returns": self.stop,
            **{f"that this rank's {what} after `load` are those of the stop": True
               for what in _state_of(*self._new_job(seed=0))},
            "that `save` changes nothing": True,
            "that each loss of the resumed run is that of the run which went on": True,
            "that the resumed run ends where the other one did": True}

    def _new_job(self, seed):
        """A model and its optimizer; the ranks have equal weights, and random numbers of their own.
        """
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16),
                              nn.Dropout(0.3), nn.Linear(16, 10))
        torch.manual_seed(seed + 1 + (dist.get_rank() if dist.is_initialized() else 0))
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def _train(self, model, optimizer, steps):
        """Trains with a falling learning rate; the losses of this rank."""
        images, labels = self.given
        losses = []
        for step in steps:
            mine = torch.arange(16 * step, 16 * step + 16)[dist.get_rank()::dist.get_world_size()]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            flat = parameters_to_vector([each.grad for each in model.parameters()])
            dist.all_reduce(flat)
            for parameter, mean in zip(model.parameters(), unpack(
                    flat / dist.get_world_size(), model.parameters()), strict=True):
                parameter.grad.copy_(mean)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            losses.append(loss.item())
        return losses


def _state_of(model, optimizer):
    """A copy of all that a step reads, a tensor for each kind."""
    momenta = [optimizer.state[each].get("momentum_buffer", torch.zeros_like(each))
               for each in model.parameters()]
    return {"weights": parameters_to_vector(model.parameters()).detach().clone(),
            "buffers": torch.cat([each.flatten().double() for each in model.buffers()]),
            "momenta": parameters_to_vector(momenta).detach().clone(),
            "learning rates": torch.tensor([group["lr"] for group in optimizer.param_groups]),
            "random numbers": torch.get_rng_state()}


def _same(one, other):
    return all(torch.equal(one[what], other[what]) for what in one)

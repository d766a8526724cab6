"""Chapter 02's drills: ranks whose gradient is not that of one process.

One backward pass over one batch of digits, in parts of different size, by a network that
normalises over the batch. Five parts are functions; one of them has a fault. One process has the
whole batch and no fault. Everything is computed twice, in float32 as the job does, and in float64.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce as all_reduce_with_gradient

from dplab import run
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table
from dplab.workloads.digits import TRAIN_SIZE, load_digits

BATCH = 24
LIMIT = 3.0  # of the gradient's length, above that of one process
NEAR = 1e-9  # relative: what float64 leaves of the same computation
BEHIND = "last.weight", "last.bias"  # of the layer behind the normalisation


# The parts


def features(images):
    return images.flatten(1)


def own_part(batch, sizes):
    rank = dist.get_rank()
    first = sum(sizes[:rank])
    return batch[first : first + sizes[rank]]


def sum_over_ranks(x):
    return all_reduce_with_gradient(x, "sum", dist.group.WORLD)


def normalise(x, over_ranks):
    count = over_ranks(x.new_tensor([len(x)]))
    center = over_ranks(x.sum(dim=0)) / count
    variance = over_ranks((x - center).square().sum(dim=0)) / count
    return (x - center) / (variance + 1e-5).sqrt()


def loss_of(logits, labels):
    total = torch.tensor(len(labels))
    dist.all_reduce(total)
    return dist.get_world_size() * F.cross_entropy(logits, labels, reduction="sum") / total


def average(gradients):
    for gradient in gradients:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)


def clip(gradients, limit):
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= min(1, limit / length)


def after_backward(gradients, limit):
    average(gradients)
    clip(gradients, limit)


@dataclass(frozen=True)
class Parts:
    """What `one_backward` is made of."""

    features: Callable = features
    own_part: Callable = own_part
    sum_over_ranks: Callable = sum_over_ranks
    normalise: Callable = normalise
    loss_of: Callable = loss_of
    after_backward: Callable = after_backward


@dataclass(frozen=True)
class Settings:
    """The same on every rank. ``sizes``: of the ranks' parts of the batch."""

    batch: tuple[int, ...]
    sizes: tuple[int, ...]
    seed: int


@dataclass
class Recording:
    """What one rank did. ``each``: the loss of each of its samples; gradients in float64."""

    samples: list[int]
    loss: float
    each: list[float]
    gradients: dict[str, torch.Tensor]


def one_backward(parts: Parts, settings: Settings, dtype: torch.dtype) -> Recording:
    digits = load_digits()
    torch.manual_seed(settings.seed)
    model = nn.ModuleDict({"first": nn.Linear(64, 24), "last": nn.Linear(24, 10)}).to(dtype)
    mine = list(parts.own_part(settings.batch, settings.sizes))
    images, labels = digits.train_images[mine].to(dtype), digits.train_labels[mine]
    x = parts.normalise(model["first"](parts.features(images)), parts.sum_over_ranks)
    logits = model["last"](F.gelu(x))
    loss = parts.loss_of(logits, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's would give one of the faults away
        loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()
             if parameter.grad is not None and name != "first.bias"}  # its right gradient is zero
    parts.after_backward(list(named.values()), LIMIT)
    return Recording(mine, loss.item(), F.cross_entropy(logits, labels, reduction="none").tolist(),
                     {name: gradient.double() for name, gradient in named.items()})


# Readings


@dataclass
class Readings:
    """The ranks in float64 and, as ``single``, in float32; and one process in float64.

    ``together``: one process with the ranks' samples, some of them perhaps twice.
    """

    ranks: list[Recording]
    single: list[Recording]
    one: Recording
    together: Recording

    def against_one(self, ranks, *names) -> tuple[float, float, float]:
        """Of the gradient of these parameters: relative error, length ratio, cosine."""
        found, right = (torch.cat([each.gradients[name].flatten()
                                   for name in names or self.one.gradients])
                        for each in (ranks[0], self.one))
        return ((found - right).norm() / right.norm()).item(), (
            found.norm() / right.norm()).item(), F.cosine_similarity(found, right, dim=0).item()

    @property
    def is_a_factor(self) -> bool:
        error, ratio, _ = self.against_one(self.ranks)
        return NEAR < error < abs(ratio - 1) + NEAR

    @property
    def sums(self) -> list[float]:
        """The summed loss of each rank's samples, all ranks' together in one process."""
        of = dict(zip(self.together.samples, self.together.each, strict=True))
        return [sum(of[each] for each in rank.samples) for rank in self.ranks]

    @property
    def scales(self) -> list[float]:
        """What each rank returns, divided by the summed loss of its samples."""
        return [rank.loss / total for rank, total in zip(self.ranks, self.sums, strict=True)]

    @property
    def same_loss(self) -> bool:
        return near(sum(rank.loss for rank in self.ranks) / len(self.ranks), self.one.loss)

    @property
    def in_two_parts(self) -> int:
        every = [sample for rank in self.ranks for sample in rank.samples]
        return len(every) - len(set(every))


def near(found, right):
    return abs(found - right) < NEAR * abs(right)


# Suspects


def rounding(readings):
    single, double = (readings.against_one(ranks)[0] for ranks in (readings.single, readings.ranks))
    return double < 1e-6 * single and single > 1e-5, (
        f"In float32 the error is {single:.1e}, in float64 {double:.1e}.")


def divisor(readings):
    error, ratio, _ = readings.against_one(readings.ranks)
    return readings.is_a_factor and ratio < 1, (
        f"The gradient is {ratio:.4f} times as long as it should be, and its error is {error:.4f}: "
        "a factor explains all of it if both add up to 1.")


def lopsided(readings):
    rank, counts = readings.ranks[0], [len(each.samples) for each in readings.ranks]
    returned = [count * scale for count, scale in zip(counts, readings.scales, strict=True)]
    return all(near(each, 1) for each in returned), (
        f"Rank 0 has {len(rank.samples)} of {BATCH} samples, and returns "
        f"{returned[0]:.3f} times their mean loss. By its share it is "
        f"{len(readings.ranks)} · {len(rank.samples)}/{BATCH} = "
        f"{len(readings.ranks) * len(rank.samples) / BATCH:.3f}.")


def counted_twice(readings):
    return readings.in_two_parts > 0, (
        f"{readings.in_two_parts or 'None'} of the samples stand on two ranks.")


def severed(readings):
    behind, rest = (readings.against_one(readings.ranks, *names)[0]
                    for names in (BEHIND, ("first.weight",)))
    return readings.same_loss and behind < NEAR and rest > 1e-3, (
        f"The error of the layer behind the normalisation is {behind:.1e}, that of the layer "
        f"before it {rest:.1e}. Forward is {'right' if readings.same_loss else 'wrong already'}.")


def private(readings):
    scales = readings.scales
    by_counts = all(near(each, scales[0]) for each in scales) or lopsided(readings)[0]
    return not by_counts, (
        f"The ranks return {', '.join(f'{each:.7f}' for each in scales)} times the summed loss of "
        f"their samples in one process. {'N' if by_counts else 'No n'}umbers of samples explain "
        f"this, so each sample's own loss is {'right' if by_counts else 'wrong'}.")


def premature(readings):
    behind, ratio, _ = readings.against_one(readings.ranks, *BEHIND)
    fits = readings.same_loss and behind > 1e-3 and not readings.is_a_factor
    return fits, (f"Forward is {'right' if readings.same_loss else 'wrong already'}. The last "
                  f"layer, which is nearest to the loss, has the error {behind:.4f} and the length "
                  f"ratio {ratio:.4f}. Where ranks' gradients are cut one by one, the error is "
                  "larger than |length ratio - 1|.")


SUSPECTS = (
    Suspect("harmless rounding", "The code is right; the dtype shows.", "errors", rounding),
    Suspect("surplus divisor", "The whole gradient is divided once too often.", "lengths", divisor),
    Suspect("lopsided shares", "Ranks count alike, though they have different numbers of samples.",
            "losses", lopsided),
    Suspect("double counting", "Some samples are in two ranks' parts.", "samples", counted_twice),
    Suspect("severed path", "Autograd does not see what an all-reduce in forward did.",
            "parameters", severed),
    Suspect("private statistics", "Each rank normalises with its own samples.", "losses", private),
    Suspect("premature clipping", "The ranks' gradients are clipped before they are averaged.",
            "parameters", premature),
)

# What holds for every job, and what for those whose forward is right, or is not.
_EVERY = ("Our regression test wants the gradient on {n} GPUs to be that of one GPU, up to 1e-5. "
          "It is red. Who broke it?",
          "One GPU and {n} GPUs, the same weights and the same batch: after one step the weights "
          "are not the same. Does that matter?")
_SECOND = "On {n} GPUs the first loss is that of one GPU, and the second is not."
_FIRST = "On {n} GPUs already the first logged loss is not that of one GPU."


def _fault(edits, complaint, *symptoms, part=None):
    return Fault(edits, complaint, set(symptoms), (3, 4), also=_EVERY, part=part)


CASES = (
    Case("a", "harmless rounding", features, (
        Fault({"images.flatten(1)": "3000 + images.flatten(1)"}, _EVERY[0], {"close"}, (3, 4),
              also=_EVERY[1:]),)),
    Case("b", "surplus divisor", loss_of, (
        _fault({"dist.get_world_size() * F": "F"}, _FIRST, "shorter", "other loss"),
        _fault({"average(gradients)": "average(gradients)\nfor gradient in gradients:\n"
                                      "    gradient /= dist.get_world_size()"},
               _SECOND, "shorter", "right loss", part=after_backward))),
    Case("c", "lopsided shares", loss_of, (
        _fault({'dist.get_world_size() * F.cross_entropy(logits, labels, reduction="sum") / total':
                "F.cross_entropy(logits, labels)"}, _FIRST, "other loss"),)),
    Case("d", "double counting", own_part, (
        _fault({"batch[first :": "batch[max(0, first - 1) :"}, _FIRST, "other loss"),)),
    Case("e", "severed path", sum_over_ranks, (
        _fault({'return all_reduce_with_gradient(x, "sum", dist.group.WORLD)':
                "total = x.clone()\ndist.all_reduce(total)\nreturn total"},
               _SECOND, "right loss"),)),
    Case("f", "private statistics", normalise, (
        _fault({"over_ranks(": "("}, _FIRST, "other loss"),)),
    Case("g", "premature clipping", after_backward, (
        _fault({"average(gradients)\n    clip(gradients, limit)":
                "clip(gradients, limit)\naverage(gradients)"}, _SECOND, "right loss"),)),
)


class WrongGradient(SickJob):
    """A gradient on several ranks that is not that of one process."""

    chapter = 2
    suspects_known = SUSPECTS
    cases = CASES

    @property
    def _legend(self):
        if self._case.suspect == "harmless rounding":
            return ("Nothing is to be mended. With `-`, which ran, all images are lifted by 3000; "
                    "the normalisation takes that away again, but float32 has lost digits by then.")
        return super()._legend

    @property
    def _part_name(self):
        return self._healthy.__name__  # the faults of a suspect are in more than one part

    def _draw_settings(self, chances: random.Random) -> Settings:
        rest = self._world_size - 1
        small = [chances.randrange(2, 5) for _ in range(rest - 1)]
        small.append(9 - sum(small) if rest == 2 else 10 - sum(small))
        batch = tuple(chances.sample(range(TRAIN_SIZE), BATCH))
        return Settings(batch, (BATCH - sum(small), *small), chances.randrange(1_000_000))

    def _description(self):
        return (f"{self._world_size} ranks share a batch of {BATCH} digits, in parts of different "
                "size. One layer, a normalisation over the batch, one more layer (`last`). Each "
                f"rank returns a loss, the gradients are averaged, and clipped at {LIMIT:g}. One "
                "process with the whole batch says what is right. All are in float32.")

    def _run(self, part):
        parts = replace(Parts(), **{self._part_name: part})
        whole = replace(self._settings, sizes=(BATCH,))
        [one] = run(one_backward, 1, Parts(), whole, torch.float64, backend="gloo")
        ranks, single = (run(one_backward, self._world_size, parts, self._settings, dtype,
                             backend="gloo") for dtype in (torch.float64, torch.float32))
        every = tuple(sample for rank in ranks for sample in rank.samples)
        [together] = [one] if every == whole.batch else run(
            one_backward, 1, Parts(), replace(whole, batch=every, sizes=(len(every),)),
            torch.float64, backend="gloo")
        return Readings(ranks, single, one, together)

    @instrument
    def errors(self) -> None:
        """The gradient's relative error, in float32 and repeated in float64."""
        for name, ranks in (("float32", self._readings.single), ("float64", self._readings.ranks)):
            print(f"{name}: {self._readings.against_one(ranks)[0]:.2g}")

    @instrument
    def lengths(self) -> None:
        """How long the gradient is, where 1 is right, and its cosine with the right one."""
        _, ratio, cosine = self._readings.against_one(self._readings.single)
        print(f"length ratio {ratio:.4f}, cosine {cosine:.4f}")

    @instrument
    def parameters(self) -> None:
        """The error and the length of each parameter's gradient, in the order of backward."""
        rows = ((name, self._readings.against_one(self._readings.single, name))
                for name in reversed(self._readings.one.gradients))
        print_table(["", "relative error", "length ratio"], *(
            [name, f"{error:.2g}", f"{ratio:.4f}"] for name, (error, ratio, _) in rows))

    @instrument
    def losses(self) -> None:
        """What each rank returns, and how many times its samples' summed loss in one process."""
        readings = self._readings
        print_table(["", "samples", "returns", "their sum in one process", "returns / sum"], *(
            [f"rank {rank}", len(each.samples), f"{each.loss:.4f}", f"{total:.4f}", f"{scale:.7f}"]
            for rank, (each, total, scale) in enumerate(zip(
                readings.ranks, readings.sums, readings.scales, strict=True))))
        found = sum(rank.loss for rank in readings.ranks) / len(readings.ranks)
        print(f"averaged over the ranks {found:.4f}, the whole batch in one process "
              f"{readings.one.loss:.4f}")

    @instrument
    def samples(self) -> None:
        """Which samples of the training set each rank has, and how many are distinct."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}: {' '.join(map(str, sorted(each.samples)))}")
        every = [sample for each in self._readings.ranks for sample in each.samples]
        print(f"{len(every)} on all ranks, {len(set(every))} of them distinct")

"""Exercise 4.4: repair a loop that hangs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import optimizer_for
from dplab.exercises.average_gradients import average_gradients
from dplab.exercises.train_by_hand import _NOT_GIVEN, _weights_of, one_device
from dplab.workloads.digits import digits_classifier, load_digits


def train_uneven(model, optimizer, images, labels, batches):
    # The ranks agree on the number of steps, so that nobody leaves while another still calls.
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for step in range(steps):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        # The average will divide by the number of ranks, so the loss is multiplied by it.
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def train_uneven_stub(model, optimizer, images, labels, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        average_gradients(model)
        optimizer.step()


def longest_of(batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return steps


def stops_with_the_shortest(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    for batch in batches[:steps]:
        samples = torch.tensor(len(batch))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def stops_with_the_shortest_by_means(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    train_uneven_stub(model, optimizer, images, labels, batches[:steps])


def divides_by_all_ranks(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        optimizer.zero_grad()
        if step < len(batches):
            loss = F.cross_entropy(model(images[batches[step]]), labels[batches[step]])
        else:
            loss = 0 * model(images[:1]).sum()
        loss.backward()
        average_gradients(model)
        optimizer.step()


def divides_by_those_left(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        left = torch.tensor(float(step < len(batches)))
        dist.all_reduce(left)
        optimizer.zero_grad()
        if step < len(batches):
            loss = F.cross_entropy(model(images[batches[step]]), labels[batches[step]])
        else:
            loss = 0 * model(images[:1]).sum()
        (loss * dist.get_world_size() / left).backward()
        average_gradients(model)
        optimizer.step()


def sums_over_the_samples(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine], reduction="sum").backward()
        average_gradients(model)
        optimizer.step()


def forgets_the_ranks(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss / samples).backward()
        average_gradients(model)
        optimizer.step()


def does_not_step_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        if len(mine) > 0:
            optimizer.step()


def repeats_its_last_batch(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = torch.tensor([], dtype=torch.int64)
        if batches:
            mine = batches[min(step, len(batches) - 1)]
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def begins_anew_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = torch.tensor([], dtype=torch.int64)
        if batches:
            mine = batches[step % len(batches)]
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def keeps_its_last_gradients(model, optimizer, images, labels, batches):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        if len(mine) > 0:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def goes_on_alone(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    stops_with_the_shortest(model, optimizer, images, labels, batches)
    one_device(model, optimizer, images, labels, batches[steps:])


def counts_all_samples_once(model, optimizer, images, labels, batches):
    samples = torch.tensor(sum(map(len, batches)))
    dist.all_reduce(samples)
    steps = longest_of(batches)
    for step in range(steps):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        (loss * dist.get_world_size() * steps / samples).backward()
        average_gradients(model)
        optimizer.step()


def has_no_gradients_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        optimizer.zero_grad()
        if step < len(batches):
            F.cross_entropy(model(images[batches[step]]), labels[batches[step]]).backward()
        average_gradients(model)
        optimizer.step()


def counts_and_has_no_gradients_when_out(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        mine = batches[step] if step < len(batches) else torch.tensor([], dtype=torch.int64)
        samples = torch.tensor(len(mine))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        if len(mine) > 0:
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def averages_only_with_data(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        if step < len(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batches[step]]), labels[batches[step]]).backward()
            average_gradients(model)
            optimizer.step()


def waits_at_the_end(model, optimizer, images, labels, batches):
    train_uneven_stub(model, optimizer, images, labels, batches)
    dist.barrier()


def asks_in_each_step(model, optimizer, images, labels, batches):
    for batch in batches:
        samples = torch.tensor(len(batch))
        dist.all_reduce(samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
        (loss * dist.get_world_size() / samples).backward()
        average_gradients(model)
        optimizer.step()


def weighs_the_notebooks_data(model, optimizer, images, labels, batches):
    digits = load_digits()
    train_uneven(model, optimizer, digits.train_images, digits.train_labels, batches)


def indexes_past_the_end(model, optimizer, images, labels, batches):
    for step in range(longest_of(batches)):
        batch = batches[step]
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        average_gradients(model)
        optimizer.step()

_STILL_LEAVES = ("A rank that is out of data still makes fewer calls than the others, and one of "
                 "them waits for it. All ranks have to take the same number of steps: let them "
                 "agree on it before the first.")

_NO_CALL = ("A rank that is out of data makes no call: it does not average, or its gradients are "
            "None, and `average_gradients` skips those. The others wait for it. It has to bring "
            "zeros, in as many steps as the longest list has.")

_REPEATS = ("A rank that is out of data trains on some of its samples again. The step's gradient "
            "must come from the ranks that still have a batch: bring zeros.")


class UnevenLoop(Exercise):
    number = "4.4"
    title = "Repair a loop that hangs"
    minutes = 20
    seconds = 10.0
    tolerance = 1e-4
    hints = (
        "How many times does each rank call `average_gradients`? What would a rank without data "
        "have to bring to that call, so that the others can go on?",
        "Two things have to be known on all ranks: the number of steps of the longest list, and "
        "in each step the number of samples of all ranks. Both are one small all-reduce. Without "
        "data, a rank brings zeros, and steps like the others.",
        "`steps` by MAX, `samples` by SUM in each step. A rank without data takes an empty tensor "
        "of indices: with `reduction=\"sum\"` its loss is 0, and `backward` gives zeros. Each rank "
        "runs `backward` on loss · world size / samples, then averages and steps.",
    )
    solution = staticmethod(train_uneven)
    stub = staticmethod(train_uneven_stub)
    mistakes = (
        Mistake(stops_with_the_shortest, "All ranks stop when the shortest list ends. What the "
                "others still have is never trained on: go on until the longest ends."),
        Mistake(stops_with_the_shortest_by_means, "All ranks stop when the shortest list ends, and "
                "each rank counts the same, however many samples it has. Go on until the longest "
                "list ends, and weigh each sample the same."),
        Mistake(divides_by_all_ranks, "Each rank's mean loss has the same weight, and ranks "
                "without data count as well. So a sample in a small batch counts more than one in "
                "a large batch. Divide by the number of samples of all ranks in this step."),
        Mistake(divides_by_those_left, "Each rank that has a batch counts the same. But the "
                "batches differ in size, and each *sample* has to count the same: divide by the "
                "number of samples of all ranks in this step."),
        Mistake(sums_over_the_samples, "You sum over the samples and do not divide by their number "
                "in this step."),
        Mistake(forgets_the_ranks, "The gradient is N times too small. You divide by all samples "
                "of this step, and `average_gradients` divides by the number of ranks once more: "
                "multiply by it."),
        Mistake(does_not_step_when_out, "A rank that is out of data takes part in the average, but "
                "not in the step, so its weights stay behind. Every rank takes every step."),
        Mistake(repeats_its_last_batch, _REPEATS),
        Mistake(begins_anew_when_out, _REPEATS),
        Mistake(keeps_its_last_gradients, "A rank that is out of data brings the gradients of the "
                "step before once more. Clear them first, so that it brings zeros."),
        Mistake(goes_on_alone, "When the first rank is out of data, the others go on without "
                "averaging. From there on each trains a model of its own."),
        Mistake(counts_all_samples_once, "You divide by the mean number of samples of a step. The "
                "steps differ: ask for the number in each one."),
        Mistake(has_no_gradients_when_out, _NO_CALL, hangs=True),
        Mistake(counts_and_has_no_gradients_when_out, _NO_CALL, hangs=True),
        Mistake(averages_only_with_data, _NO_CALL, hangs=True),
        Mistake(waits_at_the_end, "A barrier does not help: one rank waits in it, and the others "
                "wait in their next average. All ranks have to take the same number of steps.",
                hangs=True),
        Mistake(asks_in_each_step, _STILL_LEAVES, hangs=True),
        Mistake(weighs_the_notebooks_data, _NOT_GIVEN),
        Mistake(indexes_past_the_end, "This rank has no batch for this step. It has to take part "
                "all the same, with zeros."),
    )

    def prepare(self):
        digits = load_digits()
        return digits.train_images[-100:], digits.train_labels[-100:]  # not the notebook's first

    def trial(self, attempt):
        model, steps = digits_classifier(seed=0), []
        optimizer = optimizer_for(model)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        attempt(model, optimizer, *self.given, _uneven(dist.get_rank()))
        return {"the number of steps": len(steps), **_weights_of(model)}

    def expected(self, world_size):
        ranks = [_uneven(rank) for rank in range(world_size)]
        batches = [torch.cat([own[step] for own in ranks if step < len(own)])
                   for step in range(max(map(len, ranks)))]
        model = digits_classifier(seed=0)
        one_device(model, optimizer_for(model), *self.given, batches)
        return {"the number of steps": len(batches), **_weights_of(model)}


def _uneven(rank):
    """This rank's batches: their number and their sizes are its own, and rank 2 has none."""
    sizes = [[3, 7], [5, 2, 6, 4], [], [8]][rank]
    return list(torch.arange(25 * rank, 25 * rank + sum(sizes)).split(sizes)) if sizes else []

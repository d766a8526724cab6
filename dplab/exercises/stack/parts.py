"""The course's short version of each part of the stack: the idea alone, from send to ZeRO-3.

Each part calls the earlier ones by their names, so a reader's version can take the place of any of
them (see `dplab.exercises.stack.build`). What the parts agree on stands in `table`. What production
needs beside the idea (parameters that are frozen, tied or unused, other dtypes, state dicts) stands
in `dplab.parallel`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# --- chapter 03: all-reduce ----------------------------------------------------------------------


def exchange(outgoing, to, source, group=None):
    """Sends a tensor to one rank and returns what another one sends, of the same size and dtype."""
    arriving = torch.empty_like(outgoing)
    sending = dist.isend(outgoing, group_dst=to, group=group)  # does not wait, so nobody deadlocks
    dist.recv(arriving, group_src=source, group=group)
    sending.wait()
    return arriving


def ring_reduce_scatter(flat, group=None):
    """This rank's chunk of the sum of all ranks' flat tensors."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = flat.view(ranks, -1)

    # Chunk c starts at rank c+1, collects each rank's part on its way round, and ends at rank c.
    total = chunks[left].clone()
    for step in range(1, ranks):
        arriving = exchange(total, right, left, group)
        total = arriving + chunks[(rank - 1 - step) % ranks]
    return total


def ring_all_gather(chunk, group=None):
    """The chunks of all ranks, in the order of ranks, as one flat tensor."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = chunk.new_empty(ranks, len(chunk))
    chunks[rank] = chunk

    # Each rank first sends its own chunk, and then passes on the one that has just arrived.
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        chunks[(rank - 1 - step) % ranks] = exchange(outgoing, right, left, group)
    return chunks.view(-1)


def ring_all_reduce(flat, group=None):
    """The sum of all ranks' flat tensors, on every rank."""
    return ring_all_gather(ring_reduce_scatter(flat, group), group)


def ring_seconds(nbytes, ranks, bandwidth, latency):
    """How long a ring all-reduce takes: 2(N-1) messages, one after another, of 1/N of the bytes."""
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


# --- chapter 04: DDP by hand ---------------------------------------------------------------------


def pack(tensors, ranks):
    """A copy of all tensors in one flat tensor, with zeros at the end so that N divides its length.
    """
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % ranks))


def unpack(flat, tensors):
    """Views into a flat tensor, one in the shape of each tensor; the padding is left out."""
    tensors = list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def broadcast_weights(model, group=None):
    """Overwrites the parameters and buffers of all ranks with those of the group's rank 0."""
    # Parameters and buffers are everything that a forward pass reads.
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=0, group=group)


def average_gradients(model, group=None):
    """Replaces each gradient by its mean over the ranks."""
    ranks = dist.get_world_size(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            # One at a time: a flat tensor has one dtype, and gradients may have several.
            flat = pack([parameter.grad], ranks)
            total = ring_all_reduce(flat / ranks, group)
            [mean] = unpack(total, [parameter.grad])
            parameter.grad.copy_(mean)


def train_by_hand(model, optimizer, images, labels, batches, group=None):
    """Trains the same model on every rank; each rank computes its own part of each global batch."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    broadcast_weights(model, group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        average_gradients(model, group)
        optimizer.step()


# --- chapter 05: buckets and overlap -------------------------------------------------------------


def make_buckets(sizes, bucket_bytes):
    """Indices from the last to the first, in buckets that close when they reach ``bucket_bytes``.

    Backward computes the last layer's gradients first, so the last parameters fill the first
    bucket. ``sizes``: the bytes of each.
    """
    buckets, held = [], bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def average_in_buckets(buckets, group=None):
    """Replaces the gradients by their means over the ranks, with one all-reduce for each bucket."""
    ranks = dist.get_world_size(group)
    for bucket in buckets:
        gradients = [parameter.grad for parameter in bucket]
        mean = ring_all_reduce(pack(gradients, ranks) / ranks, group)
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)


class OverlappedGradients:
    """Averages each bucket's gradients while backward computes those of the next ones.

    A bucket leaves when it is full and the buckets before it have left. So all ranks launch the
    same buckets in the same order. One thread averages them, one after another.
    """

    def __init__(self, buckets, group):
        self.buckets, self.group = buckets, group
        self.thread = ThreadPoolExecutor(max_workers=1)  # one thread, with a queue before it
        self.start_over()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def start_over(self):
        self.missing = {parameter: 1 for bucket in self.buckets for parameter in bucket}
        self.launched = []

    def gradient_is_ready(self, parameter):
        self.missing[parameter] -= 1
        for bucket in self.buckets[len(self.launched):]:
            if any(self.missing[each] for each in bucket):
                break  # the buckets behind it wait, full or not
            self.launch(bucket)

    def launch(self, bucket):
        self.launched.append(self.thread.submit(average_in_buckets, [bucket], self.group))

    def finish(self):
        launched, missing = self.launched, self.missing
        self.start_over()
        for averaging in launched:
            averaging.result()  # waits, and raises what went wrong on the thread
        wrong = [number for number, bucket in enumerate(self.buckets)
                 if any(missing[each] for each in bucket)]  # -1: a second gradient came
        if wrong:
            raise RuntimeError(f"not every parameter of the buckets {wrong} got one gradient: "
                               "leave out what no loss uses, call finish() after each backward")


def predict_step(layers, bucket_bytes, ranks, bandwidth, latency):
    """The seconds of a step whose buckets leave during backward, and how many of them are exposed.

    ``layers`` in the order of forward, each with ``forward_seconds``, ``backward_seconds`` and
    ``gradient_bytes``. Exposed is the communication that is left when backward is over.
    """
    now = sum(layer.forward_seconds for layer in layers)
    ready = [0.0] * len(layers)
    for index in reversed(range(len(layers))):
        now += layers[index].backward_seconds
        ready[index] = now

    free = 0.0  # when the link has sent everything that was launched so far
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        start = max(free, ready[bucket[-1]])
        free = start + ring_seconds(nbytes, ranks, bandwidth, latency)
    return free, free - now


# --- chapter 08: ZeRO by hand --------------------------------------------------------------------


def lay_flat(parameters, ranks):
    """Moves parameters into one flat tensor, padded; each of them is a view into it from now on."""
    flat = pack(parameters, ranks)
    for parameter, view in zip(parameters, unpack(flat, parameters), strict=True):
        parameter.data = view
    return flat


class ShardedOptimizer:
    """ZeRO-1: each rank updates its own chunk of the parameters, and has state for that alone.

    An all-reduce is a reduce-scatter and an all-gather. The update goes between the two.
    ``make_optimizer`` makes a torch optimizer from a list of tensors. It must update each element
    from that element's own gradient and state, as Adam does: it sees only this rank's chunk.
    """

    def __init__(self, flat, make_optimizer, group=None):
        self.flat, self.group, self.ranks = flat, group, dist.get_world_size(group)
        self.own = flat.view(self.ranks, -1)[dist.get_rank(group)]
        self.optimizer = make_optimizer([self.own])

    def step(self, gradient):
        """Takes this rank's flat gradient, of its own part of the batch."""
        self.update(ring_reduce_scatter(gradient / self.ranks, self.group))

    def update(self, gradient):
        """Takes the mean gradient of this rank's chunk alone."""
        self.own.grad = gradient
        self.optimizer.step()
        self.flat.copy_(ring_all_gather(self.own, self.group))


def scatter_gradients(parameters, group=None):
    """This rank's chunk of the mean gradient; the parameters' own gradients are freed."""
    ranks = dist.get_world_size(group)
    flat = pack([parameter.grad for parameter in parameters], ranks)
    for parameter in parameters:
        parameter.grad = None
    return ring_reduce_scatter(flat / ranks, group)


class ShardedGradients:
    """ZeRO-2: as ZeRO-1, and gradients go to their owners during backward, bucket by bucket.

    Each bucket is a ZeRO-1 of its own. A hook sends a full bucket and waits until it has arrived.
    On a thread, whole gradients could pile up before it, and memory is what this is about.
    """

    def __init__(self, parameters, make_optimizer, bucket_bytes, group=None):
        self.group, self.missing, self.arrived = group, {}, {}
        sizes = [parameter.nbytes for parameter in parameters]
        for indices in make_buckets(sizes, bucket_bytes):
            bucket = [parameters[index] for index in indices]
            flat = lay_flat(bucket, dist.get_world_size(group))
            optimizer = ShardedOptimizer(flat, make_optimizer, group)
            self.missing[optimizer] = len(bucket)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    partial(self.gradient_is_ready, optimizer, bucket))

    def gradient_is_ready(self, optimizer, bucket, _parameter):
        self.missing[optimizer] -= 1
        if self.missing[optimizer] == 0:
            self.arrived[optimizer] = scatter_gradients(bucket, self.group)
            self.missing[optimizer] = len(bucket)

    def step(self):
        if waiting := self.missing.keys() - self.arrived.keys():
            raise RuntimeError(f"{len(waiting)} of {len(self.missing)} buckets are not full: some "
                               "of their parameters got no gradient. Call backward before step(), "
                               "and leave out parameters that the loss does not use.")
        for optimizer, gradient in self.arrived.items():
            optimizer.update(gradient)
        self.arrived = {}


# --- chapter 09: ZeRO-3 by hand ------------------------------------------------------------------


def sharded_forward(chunk, compute, x, group=None):
    """The output of a layer of which each rank has one chunk: gather, use, free.

    ``compute(whole, x)`` is the layer, with its parameters as one flat tensor.
    """
    with torch.no_grad():  # a graph would keep the whole parameters
        whole = ring_all_gather(chunk, group)
        return compute(whole, x)


def sharded_backward(chunk, compute, x, gradient, group=None):
    """The gradient of the layer's input, and the mean gradient of this rank's chunk.

    Forward kept neither parameters nor activations: gather again, compute again, and then let
    autograd go back through the layer.
    """
    whole = ring_all_gather(chunk.detach(), group).requires_grad_()
    x = x.detach().requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        output = compute(whole, x)
    output.backward(gradient)
    return x.grad, ring_reduce_scatter(whole.grad / dist.get_world_size(group), group)


class ShardedFunction(torch.autograd.Function):
    """Tells autograd to run `sharded_forward`, and `sharded_backward` when its turn comes."""

    @staticmethod
    def forward(ctx, chunk, compute, x, group):
        ctx.save_for_backward(chunk, x)
        ctx.compute, ctx.group = compute, group
        return sharded_forward(chunk, compute, x, group)

    @staticmethod
    def backward(ctx, gradient):
        chunk, x = ctx.saved_tensors
        to_x, to_chunk = sharded_backward(chunk, ctx.compute, x, gradient, ctx.group)
        return to_chunk, None, to_x, None


class ShardedUnit(nn.Module):
    """ZeRO-3 of one module: this rank's chunk of its parameters is all that stays here.

    Gradients go back to the first input alone. ``size``: the elements of all its parameters,
    without padding.
    """

    def __init__(self, module, group=None):
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        whole = pack(module.parameters(), ranks)
        self.chunk = nn.Parameter(whole.view(ranks, -1)[rank].clone())
        self.size = sum(parameter.numel() for parameter in module.parameters())
        self.group = group
        # Names and shapes without numbers; in a list, so that torch does not take it for a child.
        self.of = [module.to("meta")]

    def forward(self, x, *others):
        if any(torch.is_tensor(other) and other.requires_grad for other in others):
            raise ValueError("a ShardedUnit brings gradients back to its first input alone, and "
                             "another one asks for a gradient. Detach it, or join the inputs.")

        def compute(whole, x):
            names, shapes = zip(*self.of[0].named_parameters(), strict=True)
            parameters = dict(zip(names, unpack(whole, shapes), strict=True))
            return torch.func.functional_call(self.of[0], parameters, (x, *others))

        return ShardedFunction.apply(self.chunk, compute, x, self.group)


def shard_units(model, group=None):
    """Makes a `ShardedUnit` of each child with parameters, and of each such child of a list."""
    if own := [name for name, _ in model.named_parameters(recurse=False)]:
        raise ValueError(f"{', '.join(own)} of {type(model).__name__} would be in no unit, so "
                         "nobody would average its gradient. Put it into a module of its own.")
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleList):
            shard_units(child, group)
        elif list(child.parameters()):
            setattr(model, name, ShardedUnit(child, group))


# --- chapter 12: launch and survive --------------------------------------------------------------


def recut(chunks, size, rank, ranks):
    """A rank's chunk of a flat tensor of ``size`` elements, from the chunks that any N ranks saved.
    """
    old, new = len(chunks[0]), -(-size // ranks)
    chunk = chunks[0].new_zeros(new)
    for number, part in enumerate(chunks):
        first = max(rank * new, number * old)
        last = min((rank + 1) * new, (number + 1) * old, size)
        if first < last:
            chunk[first - rank * new : last - rank * new] = part[first - number * old :
                                                                 last - number * old]
    return chunk


def save_sharded(folder, model, optimizer, group=None):
    """Writes this rank's chunks, and the optimizer's state of each, into a file of its own."""
    state = {}
    for name, unit in model.named_modules():
        if hasattr(unit, "chunk"):
            state[name] = {"chunk": unit.chunk.data, **optimizer.state[unit.chunk]}
    torch.save(state, Path(folder) / f"{dist.get_rank(group):05}.pt")
    dist.barrier(group)  # nobody goes on before all files are there


def load_sharded(folder, model, optimizer, group=None):
    """Takes this rank's chunks from a folder that any number of ranks has saved."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    # mmap: of the other ranks' files, only what is used is read.
    files = [torch.load(file, mmap=True) for file in sorted(Path(folder).glob("*.pt"))]
    for name, unit in model.named_modules():
        if hasattr(unit, "chunk"):
            for key, value in files[0][name].items():
                if value.dim() == 1:
                    value = recut([file[name][key] for file in files], unit.size, rank, ranks)
                if key == "chunk":
                    unit.chunk.data.copy_(value)
                else:
                    optimizer.state[unit.chunk][key] = value.clone()

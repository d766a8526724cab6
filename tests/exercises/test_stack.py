"""The stack put together, from send and receive to ZeRO-3, beside torch's own, on 1 to 4 ranks."""

import copy
import functools
import inspect
import itertools
import time
import weakref

import pytest
import ring_beside_backward
import torch
import torch.distributed as dist
from ranks import run_each, several, world_sizes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dplab import run
from dplab.exercises import every_exercise
from dplab.exercises.stack import PARTS, build, parts
from dplab.exercises.stack.__main__ import as_text
from dplab.measure import CallLog
from dplab.predict import cost, step
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.standard_library import load_source, sample
from dplab.workloads.transformer import Transformer

GPT = TransformerConfig(layers=2, d_model=20, heads=2, d_ff=33, vocabulary=256, context=9,
                        tied=False)
LLAMA = TransformerConfig(layers=2, d_model=20, heads=2, kv_heads=1, d_ff=33, vocabulary=256,
                          context=9, gated=True, biases=False, norm="rmsnorm",
                          learned_positions=False, tied=False)
SUBGROUPS = ([1, 3], [0, 2], [0, 2, 3])  # of four ranks
STEPS = 4
PART = {part.slug: part for part in PARTS}


# --- the table and the code ----------------------------------------------------------------------

@pytest.mark.parametrize("part", PARTS, ids=PART)
def test_the_signature_in_the_table_is_that_of_the_code(part):
    called, name = part.short, part.name
    if issubclass(getattr(called, "__class__", type), type(torch.autograd.Function)):
        called, name = functools.partial(called.forward, None), f"{name}.apply"  # without ctx
    assert part.signature == f"{name}{inspect.signature(called)}"


@pytest.mark.parametrize("part", PARTS, ids=PART)
def test_a_part_calls_the_parts_in_its_row_which_all_stand_before_it(part):
    called = {each.slug for each in PARTS if each.name in _names_in(part.short)} - {part.slug}
    assert set(part.uses) == called
    assert all(PARTS.index(PART[slug]) < PARTS.index(part) for slug in part.uses)


@pytest.mark.parametrize("part", PARTS, ids=PART)
def test_a_part_is_short(part):
    lines = inspect.getsource(part.short).replace(part.short.__doc__, "").splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_the_table_is_printed_for_the_chapters_whose_exercises_ask_for_its_parts():
    text = as_text()
    asked = {each.slug: f"{each.name}{inspect.signature(each.solution)}"
             for each in every_exercise()}
    printed = [part for part in PARTS if part.slug in text.split()]
    assert all(part.signature in text for part in printed)
    mine = [part for part in printed if part.by == "reader"]
    assert [asked.get(part.slug) for part in mine] == [part.signature for part in mine]
    assert {part.slug for part in PARTS if asked.get(part.slug) == part.signature} <= {
        part.slug for part in printed}


def _names_in(definition):
    """The globals and attributes that a function uses, or the methods of a class."""
    names, codes = set(), []
    for each in vars(definition).values() if isinstance(definition, type) else [definition]:
        codes.append(getattr(getattr(each, "__func__", each), "__code__", None))
    for code in filter(None, codes):
        names |= set(code.co_names)
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    return names


# --- a part is replaced --------------------------------------------------------------------------

@pytest.mark.parametrize("slug", [part.slug for part in PARTS
                                  if any(part.slug in each.uses for each in PARTS)])
def test_a_part_in_the_place_of_the_courses_is_what_the_others_call(slug):
    def own():
        pass

    built = build({slug: own})
    assert built[slug] is own
    for user in PARTS:
        if slug in user.uses:
            assert _globals_of(built[user.slug])[PART[slug].name] is own


def _globals_of(definition):
    if isinstance(definition, type):
        definition = next(getattr(each, "__func__", each) for each in vars(definition).values()
                          if hasattr(getattr(each, "__func__", each), "__globals__"))
    return definition.__globals__


def test_a_slug_that_is_no_part_is_refused():
    with pytest.raises(ValueError, match=r"ring-sum.* ring-all-reduce"):
        build({"ring-sum": print})


def test_a_fault_in_ones_own_part_shows_in_what_is_built_on_it():
    def exchange(outgoing, to, source, group=None):
        return build()["exchange"](outgoing, to, source, group) + 1

    def sum_of_ones(parts):
        return parts["ring-all-reduce"](torch.ones(3)).tolist()

    assert run(sum_of_ones, 3, build(), backend="gloo") == [[3.0] * 3] * 3
    assert run(sum_of_ones, 3, build({"exchange": exchange}), backend="gloo") != [[3.0] * 3] * 3


# --- in groups -----------------------------------------------------------------------------------

def in_groups(case):
    """What ``case(group)`` yields, for the group of all ranks and this rank's subgroups."""
    groups = [None]
    if dist.get_world_size() == 4:
        made = [dist.new_group(ranks) for ranks in SUBGROUPS]
        groups += [group for ranks, group in zip(SUBGROUPS, made, strict=True)
                   if dist.get_rank() in ranks]
    return [found for group in groups for found in case(group)]


def assert_pairs_equal(case, world_size, **tolerance):
    """That each pair of what is and what should be is equal, for one of the CASES."""
    of_ranks = run_each(in_groups, CASES, world_size, backend="gloo")[case]
    assert all(of_ranks)
    for got, expected in itertools.chain(*of_ranks):
        torch.testing.assert_close(got, expected, **tolerance)


# --- chapter 03: the ring ------------------------------------------------------------------------

@pytest.mark.slow
@several
def test_an_exchange_takes_what_its_source_sent(world_size):
    assert_pairs_equal(exchanges, world_size)


def exchanges(group):
    """With ranks at every distance, and then of rank 0 with each other one, the late one first."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    others = range(1, ranks)
    pairs = [((rank + distance) % ranks, (rank - distance) % ranks) for distance in others]
    pairs += [(other, other) for other in others] if rank == 0 else [(0, 0)]
    for number, (to, source) in enumerate(pairs):
        if number == ranks - 1 and rank == 1:
            time.sleep(0.3)  # rank 1 is late, so what the others sent waits at rank 0
        sent = torch.tensor([rank, 10 * to])
        yield parts.exchange(sent, to, source, group), torch.tensor([source, 10 * rank])


@world_sizes
def test_the_ring_is_torchs_collectives(world_size):
    assert_pairs_equal(collectives, world_size)


def collectives(group):
    rank, ranks = dist.get_rank(), dist.get_world_size(group)
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.int64
    for dtype, chunk in itertools.product(dtypes, (1, 7)):
        flat = (torch.arange(chunk * ranks) * 3 + 5 * rank + 1).to(dtype)
        if dtype in (torch.float32, torch.float64):  # bfloat16 adds whole numbers alone exactly
            flat = torch.sin(1.7 * flat)
        whole = flat.clone()
        dist.all_reduce(whole, group=group)
        own = whole.chunk(ranks)[dist.get_rank(group)].clone()
        gathered = torch.empty(ranks * ranks * chunk, dtype=dtype)
        dist.all_gather_single(gathered, flat, group=group)
        for function, expected in ((parts.ring_reduce_scatter, own),
                                   (parts.ring_all_reduce, whole),
                                   (parts.ring_all_gather, gathered)):
            before = flat.clone()
            got = function(flat, group)
            yield got.clone(), expected
            yield flat, before  # left alone
            memory = got.untyped_storage()
            yield memory.nbytes(), got.nbytes  # of its own: no view that keeps more alive
            yield memory.data_ptr() == flat.untyped_storage().data_ptr(), False


@several
def test_an_all_reduce_has_the_same_bits_on_all_ranks_and_sends_the_least(world_size):
    found = run(_bits_and_bytes, world_size, backend="gloo")
    assert len({bits for bits, _ in found}) == 1
    assert {nbytes for _, nbytes in found} == {2 * (world_size - 1) * 11 * 4}


def _bits_and_bytes():
    flat = torch.sin(torch.arange(11.0 * dist.get_world_size()) * (1.3 + dist.get_rank()))
    with CallLog() as log:
        total = parts.ring_all_reduce(flat)
    return total.numpy().tobytes(), log.bytes("send")


def test_a_length_that_the_ranks_do_not_divide_is_refused():
    def attempt():
        for function in parts.ring_reduce_scatter, parts.ring_all_reduce:
            with pytest.raises(RuntimeError, match="shape"):
                function(torch.ones(10))

    run(attempt, 3, backend="gloo")


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_the_rings_seconds_are_those_of_the_prediction(ranks):
    link = cost.Link("", 12.5e9, 14e-6)
    for nbytes in (4e3, 28e9):
        assert parts.ring_seconds(nbytes, ranks, 12.5e9, 14e-6) == pytest.approx(
            cost.seconds("ring all-reduce", ranks, nbytes, link))


# --- chapter 04: DDP by hand ---------------------------------------------------------------------

@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_what_is_packed_is_padded_and_unpacked_as_it_was(ranks):
    tensors = [torch.randn(3, 5), torch.randn(4, 2).t(), torch.randn(()), torch.randn(1)]
    flat = parts.pack(tensors, ranks)
    assert len(flat) == -(-25 // ranks) * ranks
    assert not flat[25:].any()
    for view, tensor in zip(parts.unpack(flat, tensors), tensors, strict=True):
        assert torch.equal(view, tensor)
        view.fill_(9.0)
    assert (flat[:25] == 9.0).all()
    assert not (tensors[0] == 9.0).any()


class Mixed(nn.Module):
    """Two dtypes, a frozen and a transposed parameter, and the buffers of a BatchNorm."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.wide = nn.Linear(5, 3).double()
        self.first.bias.requires_grad_(False)
        self.norm.num_batches_tracked += seed

    def forward(self, x):
        return self.wide((torch.tanh(self.norm(self.first(x))) @ self.turned).double())


@world_sizes
def test_broadcast_weights_are_those_of_the_groups_first_rank(world_size):
    assert_pairs_equal(broadcasts, world_size, rtol=0, atol=0)


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
          torch.bfloat16, torch.float64, torch.complex64)  # those that gloo broadcasts


def broadcasts(group):
    first = 0 if group is None else dist.get_global_rank(group, 0)
    model, expected = _of_all_dtypes(dist.get_rank()), _of_all_dtypes(first)
    memory = [tensor.data_ptr() for tensor in _tensors(model).values()]
    parts.broadcast_weights(model, group)
    for name, tensor in _tensors(model).items():
        yield [each.flatten().view(torch.uint8) for each in (tensor, _tensors(expected)[name])]
    yield [tensor.data_ptr() for tensor in _tensors(model).values()], memory


def _of_all_dtypes(seed):
    model = Mixed(seed)
    for number, dtype in enumerate(DTYPES):
        numbers = torch.randint(2 if dtype == torch.bool else 9, (5, 4))
        model.register_buffer(f"buffer{number}", numbers.to(dtype), persistent=number % 2 == 0)
    return model


def _tensors(model):
    """Its parameters and all its buffers: a state_dict leaves out those that do not persist."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@world_sizes
def test_averaged_gradients_are_torchs_mean(world_size):
    assert_pairs_equal(averages, world_size)


def averages(group):
    def in_buckets(model, group):
        trained = [p for p in model.parameters() if p.grad is not None]
        parts.average_in_buckets([[p for p in trained if p.dtype == dtype]
                                  for dtype in (torch.float64, torch.float32)], group)

    for average in parts.average_gradients, in_buckets:
        model = Mixed(seed=1)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(4, 6)).square().mean().backward()
        before = copy.deepcopy(model.state_dict())
        gradients = [p.grad for p in model.parameters()]
        expected = []
        for gradient in gradients:
            if gradient is not None:
                expected.append(gradient.contiguous().clone())
                dist.all_reduce(expected[-1], dist.ReduceOp.SUM, group=group)
                expected[-1] /= dist.get_world_size(group)
        average(model, group)
        yield [gradient.contiguous() for gradient in gradients if gradient is not None], expected
        yield all(p.grad is gradient for p, gradient in zip(
            model.parameters(), gradients, strict=True)), True  # in place
        yield model.state_dict(), before


@world_sizes
def test_the_training_loop_is_ddps(world_size):
    assert_pairs_equal(training, world_size)


def training(group):
    images, labels, batches = _points()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = _network(dist.get_rank())
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
    parts.train_by_hand(model, _adam(model.parameters()), images, labels, batches, group)
    optimizer = _adam(wrapped.parameters())
    for batch in batches:
        optimizer.zero_grad()
        mine = batch[rank::ranks]
        cross_entropy(wrapped(images[mine]), labels[mine]).backward()
        optimizer.step()
    yield model.state_dict(), wrapped.module.state_dict()


def _points():
    """Data, and global batches as indices: 12 samples, which 1, 2, 3 and 4 ranks divide."""
    generator = torch.Generator().manual_seed(11)
    images, labels = torch.randn(60, 7, generator=generator), torch.arange(60) % 5
    return images, labels, torch.randperm(60, generator=generator).split(12)[:STEPS]


def _network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13), nn.Tanh(),
                         nn.Linear(13, 5))


def _adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=0.01, weight_decay=0.1)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# --- chapter 05: buckets and overlap -------------------------------------------------------------

SIZES = [196, 28, 140, 20, 60, 12]


@pytest.mark.parametrize("limit", [1, 20, 80, 81, 200, 10**9])
def test_buckets_close_when_they_reach_their_size(limit):
    layers = [step.Layer(0, 0, size) for size in SIZES]
    assert parts.make_buckets(SIZES, limit) == step.bucket_layers(layers, limit)


def test_nothing_makes_no_bucket():
    assert parts.make_buckets([], 20) == []


@pytest.mark.parametrize(("ranks", "limit", "bandwidth"), list(itertools.product(
    [1, 2, 3, 8], [1, 80, 10**9], [1e3, 1e5, 1e8])))
def test_the_predicted_step_is_that_of_the_timeline(ranks, limit, bandwidth):
    layers = [step.Layer(0.001 * (1 + index % 3), 0.002 * (1 + index % 4), size)
              for index, size in enumerate(SIZES)]
    spans = step.ddp_spans(layers, ranks, cost.Link("", bandwidth, 1e-4), bucket_bytes=limit)
    assert parts.predict_step(layers, limit, ranks, bandwidth, 1e-4) == (
        pytest.approx(step.step_seconds(spans)), pytest.approx(step.exposed_seconds(spans)))


@world_sizes
def test_training_in_buckets_is_ddps(world_size):
    assert_pairs_equal(buckets_after_backward, world_size)


@world_sizes
def test_training_with_buckets_from_hooks_is_ddps(world_size):
    assert_pairs_equal(buckets_from_hooks, world_size)


def buckets_after_backward(group):
    model = _network(seed=3)
    buckets = _buckets_of(list(model.parameters()))
    yield from _beside_ddp(model, group, lambda: parts.average_in_buckets(buckets, group))


def buckets_from_hooks(group):
    model = _network(seed=3)
    overlapped = parts.OverlappedGradients(_buckets_of(list(model.parameters())),
                                           group or dist.new_group())
    yield from _beside_ddp(model, group, overlapped.finish)


def _buckets_of(parameters):
    buckets = parts.make_buckets([parameter.nbytes for parameter in parameters], 300)
    assert len(buckets) == 3
    return [[parameters[index] for index in bucket] for bucket in buckets]


def _beside_ddp(model, group, average):
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
    for trained, finish in ((model, average), (wrapped, lambda: None)):
        optimizer = _adam(trained.parameters())
        for x, target in _batches():
            optimizer.zero_grad()
            cross_entropy(trained(x), target).backward()
            finish()
            optimizer.step()
    yield model.state_dict(), wrapped.module.state_dict()


def _batches():
    """This rank's local batches: other inputs in each step and on each rank."""
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        yield (torch.randn(5, 7, generator=generator),
               torch.randint(5, (5,), generator=generator))


def test_a_bucket_is_averaged_while_backward_still_computes():
    assert run(_waits_in_backward, 3, backend="gloo") == [[1.0, 3]] * 3


def _waits_in_backward():
    """Backward stops before the first layer, until the last layer's gradient is the ranks' mean."""
    first, second, third = layers = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)
    overlapped = parts.OverlappedGradients(
        [list(layer.parameters()) for layer in reversed(layers)], dist.new_group())
    seen = []

    def wait(_):
        overlapped.launched[0].result(timeout=20)
        seen.append(third.bias.grad.item())

    hidden = first(torch.ones(1, 2))
    hidden.register_hook(wait)
    output = third(second(hidden))
    (dist.get_rank() * output).sum().backward()  # so the gradient of the last bias is the rank
    launched = len(overlapped.launched)
    overlapped.finish()
    return [*seen, launched]


def test_what_fails_on_the_thread_is_raised_by_finish():
    def broken(flat, group=None):
        return 1 / 0

    def fails(overlapped_gradients):
        layer = nn.Linear(2, 2)
        overlapped = overlapped_gradients([list(layer.parameters())], dist.new_group())
        layer(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            overlapped.finish()

    built = build({"ring-all-reduce": broken})
    run(fails, 2, built["overlapped-gradients"], backend="gloo")


def test_a_bucket_that_is_not_full_is_told_by_finish():
    def attempt():
        used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
        overlapped = parts.OverlappedGradients([[used.weight, unused.bias], [used.bias]],
                                               dist.new_group())
        used(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"\[0\] got one gradient"):
            overlapped.finish()
        for _ in range(2):
            (used(torch.ones(1, 2)) + unused(torch.ones(1, 2))).sum().backward()
        with pytest.raises(RuntimeError, match=r"\[0, 1\] got one gradient"):
            overlapped.finish()
        overlapped.thread.submit(int).result()  # until the thread has averaged what was launched
        used.zero_grad()
        unused.zero_grad()
        (dist.get_rank() * (used(torch.ones(1, 2)) + unused(torch.ones(1, 2)))).sum().backward()
        overlapped.finish()  # which starts over after an error as well
        return used.weight.grad.tolist()

    assert run(attempt, 3, backend="gloo") == [[[1.0, 1.0], [1.0, 1.0]]] * 3


@pytest.mark.slow
def test_a_ring_on_a_thread_hides_behind_a_backward_that_only_waits():
    """300 ms of backward and 180 ms of rings: 480 ms after one another, 330 ms beside each other.

    The last bucket of 30 ms is left when backward is over.
    """
    after, threaded = ring_beside_backward.beside_waiting()
    assert after > 0.475
    assert threaded < 0.85 * after


@pytest.mark.slow
def test_a_ring_on_a_thread_beside_backward():
    assert_trained(ring_beside_backward.trial(steps=20))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_on_a_thread_beside_backward_for_long(seed):
    assert_trained(ring_beside_backward.trial(steps=500, seed=seed, timeout=1800))


def assert_trained(found):
    assert found["moved"] > 1e-4
    assert found["apart"] < 1e-3 * found["moved"]


# --- chapter 08: ZeRO ----------------------------------------------------------------------------

@world_sizes
def test_zero_1_trains_as_a_replicated_optimizer(world_size):
    assert_pairs_equal(zero_1, world_size)


@world_sizes
def test_zero_2_trains_as_a_replicated_optimizer(world_size):
    assert_pairs_equal(zero_2, world_size)


def zero_1(group):
    ranks = dist.get_world_size(group)
    for make_optimizer in _adam, _momentum:
        model = _network(seed=4)
        parameters = list(model.parameters())
        flat = parts.lay_flat(parameters, ranks)
        sharded = parts.ShardedOptimizer(flat, make_optimizer, group)
        for x, target in _batches():
            cross_entropy(model(x), target).backward()
            gradient = parts.pack([parameter.grad for parameter in parameters], ranks)
            before = gradient.clone()
            sharded.step(gradient)
            yield gradient, before
            model.zero_grad()
        weights, state = _replicated(make_optimizer, group)
        yield model.state_dict(), weights
        yield _state_elements([sharded.optimizer]), state // ELEMENTS * -(-ELEMENTS // ranks)


def zero_2(group):
    ranks = dist.get_world_size(group)
    for make_optimizer in _adam, _momentum:
        made = []

        def noted(tensors, make=make_optimizer, made=made):
            made.append(make(tensors))
            return made[-1]

        model = _network(seed=4)
        sharded = parts.ShardedGradients(list(model.parameters()), noted, 300, group)
        for x, target in _batches():
            cross_entropy(model(x), target).backward()
            yield [parameter.grad for parameter in model.parameters()], [None] * 6
            sharded.step()
        weights, state = _replicated(make_optimizer, group)
        yield model.state_dict(), weights
        chunks = sum(-(-bucket // ranks) for bucket in (83, 143, 88))  # elements of the buckets
        yield len(made), 3
        yield _state_elements(made), state // ELEMENTS * chunks


@several
def test_zero_2_sends_a_bucket_while_backward_still_computes(world_size):
    for seen, left, sent in run(_looks_in_backward, world_size, backend="gloo"):
        # Two of three layers are done, of 18 and 40 elements: their gradients are sent and freed.
        assert seen == [[None] * 6,
                        4 * (world_size - 1) * (-(-18 // world_size) + -(-40 // world_size))]
        assert left == [None] * 6
        assert sent > seen[1]


def _looks_in_backward():
    """The whole gradients before the first layer's are computed, and the bytes sent so far."""
    first, second, third = layers = nn.Linear(3, 4), nn.Linear(4, 8), nn.Linear(8, 2)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    parts.ShardedGradients(parameters, _momentum, 60)
    seen = []
    hidden = first(torch.ones(1, 3))
    with CallLog() as log:
        hidden.register_hook(lambda _: seen.extend([[p.grad for p in parameters],
                                                    log.bytes("send")]))
        third(second(hidden)).sum().backward()
    return seen, [p.grad for p in parameters], log.bytes("send")


def test_zero_2_tells_that_a_parameter_has_no_gradient():
    def attempt():
        used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
        parameters = [*used.parameters(), *unused.parameters()]
        before = [parameter.detach().clone() for parameter in parameters]
        sharded = parts.ShardedGradients(parameters, _momentum, 9)
        used(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="1 of 2 buckets"):
            sharded.step()
        assert all(map(torch.equal, parameters, before))

    run(attempt, 2, backend="gloo")


ELEMENTS = 314  # of the network's parameters


def _replicated(make_optimizer, group):
    """The weights where every rank steps with all mean gradients, and the elements of state."""
    model = _network(seed=4)
    optimizer = make_optimizer(model.parameters())
    for x, target in _batches():
        optimizer.zero_grad()
        cross_entropy(model(x), target).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
        optimizer.step()
    return model.state_dict(), _state_elements([optimizer])


def _state_elements(optimizers):
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(value.numel() for state in states for value in state.values() if value.dim() > 0)


@world_sizes
def test_scattered_gradients_are_this_ranks_chunk_of_the_mean(world_size):
    assert_pairs_equal(scattered_gradients, world_size)


def scattered_gradients(group):
    ranks = dist.get_world_size(group)
    model = _network(seed=5)
    x, target = next(_batches())
    cross_entropy(model(x), target).backward()
    whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(whole, group=group)
    size = -(-len(whole) // ranks)
    padded = nn.functional.pad(whole / ranks, (0, size * ranks - len(whole)))
    yield (parts.scatter_gradients(list(model.parameters()), group),
           padded.split(size)[dist.get_rank(group)])
    yield [parameter.grad for parameter in model.parameters()], [None] * 6


# --- chapter 09: ZeRO-3 --------------------------------------------------------------------------

@pytest.mark.slow
@world_sizes
def test_zero_3_trains_a_transformer_as_fully_shard_does(world_size):
    for own, torchs, moved in itertools.chain(*run(_transformers, world_size, build(),
                                                   backend="gloo")):
        assert moved > 0.01
        assert own.keys() == torchs.keys()
        for name in own:
            torch.testing.assert_close(own[name], torchs[name], rtol=1e-4, atol=1e-5)


def _transformers(stack):
    """Of both kinds: the weights of the stack's ZeRO-3, torch's, and how far training moved them.
    """
    return [_trained(stack, config) for config in (GPT, LLAMA)]


def _trained(stack, config):
    torch.manual_seed(dist.get_rank())  # the ranks start differently
    model = Transformer(config)
    stack["broadcast-weights"](model)
    before = copy.deepcopy(model.state_dict())
    torchs = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*torchs.blocks, torchs]:
        fully_shard(unit, mesh=mesh)
    stack["shard-units"](model)
    for trained in (model, torchs):
        optimizer = _adam(trained.parameters())
        for number in range(STEPS):
            _text_loss(trained, number, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    own = _gathered(model, config)
    moved = max((own[name] - before[name]).abs().max().item() for name in own)
    return own, {name: p.full_tensor().detach() for name, p in torchs.named_parameters()}, moved


def _text_loss(model, number, rank):
    tokens, targets = sample(load_source(), 3, 9, seed=100 * number + rank)
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _gathered(model, config, group=None):
    """The whole parameters of a model of sharded units, by name."""
    whole = {}
    units = dict(model.named_modules())
    for name, module in Transformer(config).named_modules():
        if hasattr(units.get(name), "chunk"):
            names, shapes = zip(*module.named_parameters(), strict=True)
            flat = parts.ring_all_gather(units[name].chunk.detach(), group)
            whole |= {f"{name}.{inner}": view for inner, view in zip(
                names, parts.unpack(flat, shapes), strict=True)}
    return whole


@several
def test_zero_3_gathers_twice_and_scatters_once_in_its_group(world_size):
    """In bytes, and at most one whole unit is alive at a time."""
    for sent, expected, most, left in run(_watched, world_size, backend="gloo"):
        assert sent == expected
        assert most == 1
        assert left == 0


def _watched():
    torch.manual_seed(0)
    model, most = Transformer(GPT), []
    stack, alive = _watched_stack(most)
    stack["shard-units"](model)
    with CallLog() as log:
        _text_loss(model, 0, dist.get_rank()).backward()
    chunks = sum(chunk.nbytes for chunk in model.parameters())
    return log.bytes("send"), 3 * (dist.get_world_size() - 1) * chunks, max(most), alive()


def _watched_stack(most):
    """The stack, and a function that counts the gathered wholes whose memory is not yet free.

    Each whole lies in an array of numpy's, which lives as long as any tensor on that memory.
    ``most`` collects the count after each gather.
    """
    memories = []

    def alive():
        return sum(memory() is not None for memory in memories)

    def watched_gather(chunk, group=None):
        memory = parts.ring_all_gather(chunk, group).detach().numpy().copy()
        memories.append(weakref.ref(memory))
        most.append(alive())
        return torch.from_numpy(memory)

    return build({"ring-all-gather": watched_gather}), alive


def test_forward_keeps_nothing_where_gradients_are_recorded():
    def attempt():
        stack, alive = _watched_stack([])
        chunk = nn.Parameter(torch.full((6,), 1.0 + dist.get_rank()))
        x = torch.ones(2, 3, requires_grad=True)

        def compute(whole, x):
            return x @ whole.view(3, 4)

        output = stack["sharded-forward"](chunk, compute, x)
        assert not output.requires_grad
        assert alive() == 0
        return [each.tolist() for each in parts.sharded_backward(chunk, compute, x, output)]

    # The columns of [[1, 1, 1, 1], [1, 1, 2, 2], [2, 2, 2, 2]] sum to 4, 4, 5, 5.
    to_x = [[18.0, 28.0, 36.0]] * 2
    assert run(attempt, 2, backend="gloo") == [[to_x, [8.0, 8.0, 10.0, 10.0, 8.0, 8.0]],
                                               [to_x, [10.0, 10.0, 8.0, 8.0, 10.0, 10.0]]]


def test_zero_3_in_a_subgroup_trains_as_one_process():
    found = run(_in_subgroup, 4, backend="gloo")
    expected = found[1]  # this rank is in no subgroup, and trains alone
    for rank in (0, 2, 3):
        torch.testing.assert_close(found[rank], expected, rtol=1e-4, atol=1e-5)


def _in_subgroup():
    members = SUBGROUPS[2]
    group = dist.new_group(members)
    torch.manual_seed(9)
    model = Transformer(GPT)
    inside = dist.get_rank() in members
    if inside:
        parts.shard_units(model, group)
    optimizer = _adam(model.parameters())
    for number in range(STEPS):
        losses = [_text_loss(model, number, rank) for rank in (
            [dist.get_rank()] if inside else members)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _gathered(model, GPT, group) if inside else dict(
        (name, p.detach()) for name, p in model.named_parameters())


@world_sizes
def test_a_model_with_children_without_parameters_is_sharded(world_size):
    assert_pairs_equal(zero_3_of_a_sequence, world_size)


def zero_3_of_a_sequence(group):
    model = _network(seed=4)
    parts.shard_units(model, group)
    yield [isinstance(child, parts.ShardedUnit) for child in model], [True, False] * 2 + [True]
    optimizer = _adam(model.parameters())
    for x, target in _batches():
        cross_entropy(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, _ = _replicated(_adam, group)
    whole = {}
    for number in (0, 2, 4):
        of_unit = [weights[f"{number}.{name}"] for name in ("weight", "bias")]
        flat = parts.ring_all_gather(model[number].chunk.detach(), group)
        whole |= dict(zip([f"{number}.weight", f"{number}.bias"], parts.unpack(flat, of_unit),
                          strict=True))
    yield whole, weights


def test_a_model_with_parameters_of_its_own_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(2))

    def attempt():
        model = Scaled()
        with pytest.raises(ValueError, match="scale of Scaled"):
            parts.shard_units(model)
        assert type(model.layer) is nn.Linear  # nothing has been done

    run(attempt, 2, backend="gloo")


def test_the_inputs_and_outputs_of_a_unit():
    run(_calls_units, 2, backend="gloo")


def _calls_units():
    class Scores(nn.Module):
        def __init__(self, several):
            super().__init__()
            self.layer, self.several = nn.Linear(3, 3), several

        def forward(self, x, mask, factor=1.0):
            scores = factor * self.layer(x) * mask
            return (scores, mask) if self.several else scores

    torch.manual_seed(0)
    plain, x, mask = Scores(False), torch.ones(2, 3), torch.tensor([1.0, 0.0, 2.0])
    expected = plain(x, mask, 3.0)
    unit = parts.ShardedUnit(copy.deepcopy(plain))
    torch.testing.assert_close(unit(x, mask, 3.0), expected)  # others without a graph
    with pytest.raises(ValueError, match="first input alone"):
        unit(x, mask.clone().requires_grad_())
    with pytest.raises(TypeError, match="keyword"):
        unit(x, mask=mask)
    outputs = parts.ShardedUnit(Scores(True))(x, mask)
    with pytest.raises(TypeError, match="backward"):
        outputs[0].sum().backward()


@world_sizes
def test_forward_and_backward_leave_their_inputs_alone(world_size):
    assert_pairs_equal(one_sharded_layer, world_size)


def one_sharded_layer(group):
    """A linear layer, beside its forward and backward by hand."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(2)
    weight = torch.randn(3, 5)
    torch.manual_seed(10 + dist.get_rank())
    x, gradient = torch.randn(4, 5), torch.randn(4, 3)
    chunk = parts.pack([weight], ranks).view(ranks, -1)[rank].clone()
    before = [each.clone() for each in (chunk, x, gradient)]

    def compute(whole, x):
        return x @ whole[:15].view(3, 5).T

    output = parts.sharded_forward(chunk, compute, x, group)
    to_x, to_chunk = parts.sharded_backward(chunk, compute, x, gradient, group)
    total = gradient.T @ x
    dist.all_reduce(total, group=group)
    yield output, x @ weight.T
    yield to_x, gradient @ weight
    yield to_chunk, parts.pack([total / ranks], ranks).view(ranks, -1)[rank]
    yield [chunk, x, gradient], before
    yield x.requires_grad, False


CASES = (exchanges, collectives, broadcasts, averages, training, buckets_after_backward,
         buckets_from_hooks, zero_1, zero_2, scattered_gradients, zero_3_of_a_sequence,
         one_sharded_layer)


# --- chapter 12: a checkpoint for other ranks ----------------------------------------------------

@pytest.mark.parametrize(("size", "old", "new"), list(itertools.product(
    [1, 7, 12, 25], [1, 2, 3, 4], [1, 2, 3, 4, 6])))
def test_chunks_are_cut_anew(size, old, new):
    whole = torch.arange(1, size + 1)
    chunks = nn.functional.pad(whole, (0, -size % old)).view(old, -1)
    padded = nn.functional.pad(whole, (0, -size % new)).view(new, -1)
    for rank in range(new):
        assert torch.equal(parts.recut(chunks, size, rank, new), padded[rank])


@pytest.mark.parametrize(("size", "old", "new"), [(12, 4, 6), (25, 3, 4), (7, 4, 2), (1, 4, 3)])
def test_of_the_chunks_only_what_a_rank_needs_is_read(size, old, new):
    """The others are on `meta`, which has no numbers to read."""
    long, short = -(-size // old), -(-size // new)
    chunks = nn.functional.pad(torch.arange(size) + 1, (0, -size % old)).view(old, -1)
    for rank in range(new):
        elements = range(size)[rank * short : (rank + 1) * short]
        needed = {element // long for element in elements}
        some = [chunk if number in needed or number == 0 else chunk.to("meta")
                for number, chunk in enumerate(chunks)]
        found = parts.recut(some, size, rank, new)
        assert found.tolist() == [element + 1 for element in elements] + [0] * (
            short - len(elements))


def test_a_rank_goes_on_when_the_files_of_all_ranks_are_there(tmp_path):
    def attempt():
        model = nn.Sequential(nn.Linear(3, 2))
        parts.shard_units(model)
        if dist.get_rank() == 2:
            time.sleep(0.3)
        parts.save_sharded(tmp_path, model, _momentum(model.parameters()))
        return len(list(tmp_path.iterdir()))

    assert run(attempt, 3, backend="gloo") == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 4), (2, 3), (3, 1), (3, 2), (4, 3)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved_on, loaded_on, tmp_path):
    """And trains on there: two steps on the first ranks and two on the others are four of one."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run(_train_and_save, saved_on, folder, backend="gloo")
    assert len(list(folder.iterdir())) == saved_on
    found = run(_load_and_train, loaded_on, folder, backend="gloo")
    model = _untrained()
    _take_steps(model, _adam(model.parameters()), range(4), range(12))
    for weights in found:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def _untrained():
    torch.manual_seed(6)
    return Transformer(GPT)


def _take_steps(model, optimizer, steps, rows):
    """Each step has a global batch of 12 sequences, of which this rank takes some rows."""
    for number in steps:
        tokens, targets = (each[list(rows)] for each in sample(load_source(), 12, 9, seed=number))
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _rows():
    return range(dist.get_rank(), 12, dist.get_world_size())


def _train_and_save(folder):
    model = _untrained()
    parts.shard_units(model)
    optimizer = _adam(model.parameters())
    _take_steps(model, optimizer, range(2), _rows())
    parts.save_sharded(folder, model, optimizer)


def _load_and_train(folder):
    torch.manual_seed(77)  # other weights, which the checkpoint overwrites
    model = Transformer(GPT)
    parts.shard_units(model)
    optimizer = _adam(model.parameters())
    parts.load_sharded(folder, model, optimizer)
    _take_steps(model, optimizer, range(2, 4), _rows())
    return _gathered(model, GPT)

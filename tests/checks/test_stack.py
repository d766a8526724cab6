"""The parts of the stack put together, beside torch's own, on 1 to 4 ranks."""

import copy
import functools
import inspect
import itertools
import time
import types

import pytest
import torch
import torch.distributed as dist
from ranks import run_each, several, world_sizes
from torch import nn
from torch.nn.functional import cross_entropy

from dplab import run
from dplab.checks import every_exercise
from dplab.checks.stack import PARTS, as_text
from dplab.measure import CallLog
from dplab.predict import cost, step

SUBGROUPS = ([1, 3], [0, 2], [0, 2, 3])  # of four ranks
STEPS = 4
PART = {part.slug: part for part in PARTS}
parts = types.SimpleNamespace(**{part.name: part.solution for part in PARTS})


# --- the table and the code ----------------------------------------------------------------------

@pytest.mark.parametrize("part", PARTS, ids=PART)
def test_the_signature_in_the_table_is_that_of_the_code(part):
    called, name = part.solution, part.name
    if issubclass(getattr(called, "__class__", type), type(torch.autograd.Function)):
        called, name = functools.partial(called.forward, None), f"{name}.apply"  # without ctx
    assert part.signature == f"{name}{inspect.signature(called)}"


@pytest.mark.parametrize("part", PARTS, ids=PART)
def test_a_part_calls_the_parts_in_its_row_which_all_stand_before_it(part):
    called = {each.slug for each in PARTS if each.name in _names_in(part.solution)} - {part.slug}
    assert set(part.uses) == called
    assert all(PARTS.index(PART[slug]) < PARTS.index(part) for slug in part.uses)


def test_a_part_of_the_readers_is_the_answer_to_its_exercise_and_the_table_prints_all():
    answers = {each.slug: each.solution for each in every_exercise()}
    assert {part.slug: part.solution for part in PARTS if part.by == "reader"}.items() <= (
        answers.items())
    assert all(part.signature in as_text() for part in PARTS)


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


def build(own=None):
    """Every part by slug: those of ``own``, and for the others the course's, which call those."""
    own = own or {}
    # A part finds the others among its globals, so each of them is defined anew, beside the others.
    names = {}
    for part in PARTS:
        names |= vars(inspect.getmodule(part.solution))
    for part in PARTS:
        if part.slug in own:
            names[part.name] = own[part.slug]
        else:
            exec(_code_of(part.solution), names)
    return {part.slug: names[part.name] for part in PARTS}


def _code_of(function):
    """Its definition, compiled so that an error shows the line in the file that it comes from."""
    lines, first = inspect.getsourcelines(function)
    return compile("\n" * (first - 1) + "".join(lines), inspect.getsourcefile(function), "exec")


def _globals_of(definition):
    if isinstance(definition, type):
        definition = next(getattr(each, "__func__", each) for each in vars(definition).values()
                          if hasattr(getattr(each, "__func__", each), "__globals__"))
    return definition.__globals__


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


# --- chapter 05: buckets and overlap -------------------------------------------------------------

SIZES = [196, 28, 140, 20, 60, 12]


@pytest.mark.parametrize("limit", [1, 20, 80, 81, 200, 10**9])
def test_buckets_close_when_they_reach_their_size(limit):
    layers = [step.Layer(0, 0, size) for size in SIZES]
    assert parts.make_buckets(SIZES, limit) == step.bucket_layers(layers, limit)
    assert parts.make_buckets([], limit) == []


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


CASES = (exchanges, collectives, broadcasts, averages, training, buckets_after_backward,
         buckets_from_hooks)

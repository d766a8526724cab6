"""SynchronizedBatchNorm on real ranks, against nn.BatchNorm on the whole batch in one process.

Each rank has a loss of its own, and what one process differentiates is the sum of them.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.parallel import SynchronizedBatchNorm

SHARES = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [3, 1, 0, 4]}  # samples on each rank, none on some
CHANNELS = 5
STEPS = 3
PLAIN = {(7,): nn.BatchNorm1d, (3, 2): nn.BatchNorm2d}
OPTIONS = [{}, {"momentum": None}, {"momentum": 0.37, "eps": 0.5}, {"affine": False},
           {"track_running_stats": False}]
world_sizes = pytest.mark.parametrize("world_size", SHARES)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def whole_batch(step, world_size, shape, dtype=torch.float64):
    """Inputs and the gradients of the output, (samples, channels, *shape), no two elements equal.

    Each channel has a mean and a spread of its own.
    """
    generator = torch.Generator().manual_seed(100 * world_size + step)
    size = (sum(SHARES[world_size]), CHANNELS, *shape)
    x, gradient = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    along = torch.arange(1.0, CHANNELS + 1, dtype=torch.float64).view(-1, *[1] * len(shape))
    return (3 * along + along * x).to(dtype), gradient.to(dtype)


def mine(tensor):
    return tensor.split(SHARES[dist.get_world_size()])[dist.get_rank()]


def with_own_numbers(norm):
    """The same weights and statistics everywhere, none of them 0 or 1."""
    for number, tensor in enumerate(norm.state_dict().values()):
        if tensor.is_floating_point():
            tensor.copy_(torch.arange(1, CHANNELS + 1) / 7 + number)
    return norm


def train(norm, part, steps, world_size, shape):
    """Outputs and gradients of each step, and the state after the last one."""
    seen = []
    for step in range(steps):
        x, gradient = map(part, whole_batch(step, world_size, shape))
        x.requires_grad_()
        norm.zero_grad()
        output = norm(x)
        output.backward(gradient)
        seen.append([output.detach(), x.grad, *(each.grad for each in norm.parameters())])
    return seen, norm.state_dict()


def train_on_ranks(shape, options):
    norm = with_own_numbers(SynchronizedBatchNorm(CHANNELS, **options, dtype=torch.float64))
    return train(norm, mine, STEPS, dist.get_world_size(), shape)


def train_alone(world_size, shape, options):
    norm = with_own_numbers(PLAIN[shape](CHANNELS, **options, dtype=torch.float64))
    return train(norm, lambda tensor: tensor, STEPS, world_size, shape)


def assert_same_training(on_ranks, alone):
    """The ranks' outputs and input gradients make up the whole; parameters' gradients add up."""
    for step, whole in enumerate(alone[0]):
        parts = [seen[step] for seen, _ in on_ranks]
        for kind in (0, 1):
            torch.testing.assert_close(torch.cat([part[kind] for part in parts]), whole[kind],
                                       **EXACT)
        for kind in range(2, len(whole)):
            torch.testing.assert_close(sum(part[kind] for part in parts), whole[kind], **EXACT)
    for _, state in on_ranks:
        assert state.keys() == alone[1].keys()
        for name, value in alone[1].items():
            torch.testing.assert_close(state[name], value, **EXACT)
            assert torch.equal(state[name], on_ranks[0][1][name])


@pytest.mark.slow
@world_sizes
def test_training_is_that_of_one_process(world_size):
    cases = [(shape, options) for shape in PLAIN for options in OPTIONS]
    ranks = dplab.run(lambda: [train_on_ranks(*case) for case in cases], world_size)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        assert_same_training(found, train_alone(world_size, *case))


# --- in a model ---------------------------------------------------------------------------------

def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(),
                         nn.Linear(16, 3, bias=False), nn.BatchNorm1d(3)).double()


def images(world_size):
    generator = torch.Generator().manual_seed(8)
    return torch.randn(2 * world_size, 2, 4, 4, generator=generator, dtype=torch.float64)


def loss_of(output):
    return (output * torch.arange(1.0, 4).double()).tanh().mean()


def test_ddp_averages_to_the_gradient_of_the_whole_batch():
    world_size = 3

    def gradients():
        model = DistributedDataParallel(SynchronizedBatchNorm.convert(network()))
        loss_of(model(images(world_size).chunk(world_size)[dist.get_rank()])).backward()
        return {name: each.grad for name, each in model.module.named_parameters()}

    whole = network()
    loss_of(whole(images(world_size))).backward()
    for found in dplab.run(gradients, world_size):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, **EXACT)


def test_convert_keeps_parameters_buffers_and_mode():
    inner = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    twice = nn.BatchNorm1d(3, momentum=None)
    model = nn.Sequential(nn.Linear(3, 3), twice, nn.Sequential(inner, nn.InstanceNorm1d(3)), twice)
    model.empty = None
    model[1].eval()
    state, held = copy.deepcopy(model.state_dict()), [id(each) for each in model.parameters()]
    converted = SynchronizedBatchNorm.convert(model)

    assert converted is model and [id(each) for each in model.parameters()] == held
    assert [type(model[place]) for place in (1, 3)] == 2 * [SynchronizedBatchNorm]
    assert type(model[2][0]) is SynchronizedBatchNorm and type(model[2][1]) is nn.InstanceNorm1d
    assert not model[1].training and model[2][0].training and model[1].momentum is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert model.state_dict().keys() == state.keys()
    assert isinstance(SynchronizedBatchNorm.convert(nn.BatchNorm2d(4)), SynchronizedBatchNorm)
    assert SynchronizedBatchNorm.convert(model[1]) is model[1]


# --- eval mode, dtypes, and what is refused -----------------------------------------------------

def test_eval_mode_is_batch_norm_without_a_word_to_others():
    def evaluate():
        norm = with_own_numbers(SynchronizedBatchNorm(CHANNELS)).eval()
        with dplab.measure.CallLog() as log:
            output = norm(mine(whole_batch(0, 2, (7,), torch.float32)[0]))
        return output, norm.state_dict(), log.count()

    parts = whole_batch(0, 2, (7,), torch.float32)[0].split(SHARES[2])
    for part, (output, state, calls) in zip(parts, dplab.run(evaluate, 2), strict=True):
        plain = with_own_numbers(nn.BatchNorm1d(CHANNELS)).eval()
        assert torch.equal(output, plain(part)) and calls == 0
        assert all(map(torch.equal, state.values(), plain.state_dict().values()))


def test_low_precision_keeps_statistics_in_float32():
    """The mean is 1,000 times the spread, beyond what the squares of either dtype could hold."""
    def normalize():
        norm = SynchronizedBatchNorm(CHANNELS)
        output = norm(mine(wide).requires_grad_())
        output.backward(mine(gradient))
        return output, norm.running_mean, norm.running_var

    dtype = torch.float16
    x, gradient = whole_batch(0, 3, (7,), dtype)
    wide = (x + 1000).detach()
    alone = nn.BatchNorm1d(CHANNELS)
    expected = alone(wide.float())
    found = dplab.run(normalize, 3)
    output = torch.cat([each for each, _, _ in found])
    assert output.dtype == dtype and output.isfinite().all()
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(output.float(), expected, **rounding)
    for _, mean, variance in found:
        assert mean.dtype == variance.dtype == torch.float32
        torch.testing.assert_close(mean, alone.running_mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(variance, alone.running_var, rtol=1e-5, atol=0)


def test_ranks_of_a_group_count_alone():
    def in_pairs():
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        norm = SynchronizedBatchNorm(1, momentum=1.0, group=pairs[dist.get_rank() % 2])
        norm(torch.tensor([[1.0], [2.0]]) * 10 ** dist.get_rank())
        return norm.running_mean.item()

    assert dplab.run(in_pairs, 4) == pytest.approx(2 * [(3 + 300) / 4, (30 + 3000) / 4])


def test_one_value_of_a_channel_is_refused_on_every_rank():
    def normalize(samples, shape):
        size = samples if dist.get_rank() == 1 else 0
        with pytest.raises(ValueError, match="more than one value of a channel"):
            SynchronizedBatchNorm(CHANNELS)(torch.ones(size, CHANNELS, *shape))

    cases = [(1, ()), (0, (3,)), (0, ())]
    dplab.run(lambda: [normalize(*case) for case in cases], 2)


def test_a_wrong_shape_is_refused():
    def normalize():
        for shape in ((CHANNELS,), (2, CHANNELS + 1), (CHANNELS, 2)):
            with pytest.raises(ValueError, match="expected an input of shape"):
                SynchronizedBatchNorm(CHANNELS)(torch.ones(shape))

    normalize()
    dplab.run(normalize, 1)

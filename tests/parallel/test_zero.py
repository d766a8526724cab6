"""ZeRO-1, 2 and 3 on real ranks: they train as one process does, hold their share and no more.

What is special to ZeRO-3, whose parameters come and go, is tested in test_fully_sharded.py.
"""

import contextlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from odd_models import INPUTS, OUTPUTS, SMALL_MB, Awkward, Branches, assert_all_equal, batch
from ranks import mine, run_each, world_sizes
from torch import nn
from torch.nn import functional as F

import dplab
from dplab import run
from dplab.measure import CallLog, sent_bytes
from dplab.parallel import (
    FullyShardedModel,
    ManualDDP,
    ShardedGradientOptimizer,
    ShardedOptimizer,
)
from dplab.parallel.manual_ddp import broadcast_tensors

LOCAL_BATCH = 3


# --- the ways to train ----------------------------------------------------------------------------

@dataclass
class Trainer:
    """A model with its optimizer. ``sync`` comes after backward; ``parts`` are this rank's pieces.

    ``no_sync`` keeps gradients back, where a way can do that; ``state`` is the whole state dict.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: Callable
    sync: Callable = lambda: None
    no_sync: Callable = contextlib.nullcontext

    @property
    def parts(self):
        own = getattr(self.optimizer, "pieces", None)
        return own or [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self, x, y, share=1):
        ((self.model(x) - y).square().mean() * share).backward()


def groups_of(model):
    """Two parameter groups, by the parameters' names."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [{"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.3},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 2e-3}]


def alone(module, lr=0.01):
    optimizer = torch.optim.AdamW(groups_of(module), lr=lr)
    return Trainer(module, optimizer, module.state_dict)


def zero_1(module, lr=0.01):
    model = ManualDDP(module)
    optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, lr=lr)
    return Trainer(model, optimizer, module.state_dict, model.finish_gradient_sync, model.no_sync)


def with_what_no_optimizer_has(module):
    broadcast_tensors([*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)])
    return module


def zero_1_reducing(module, lr=0.01):
    optimizer = ShardedOptimizer(groups_of(with_what_no_optimizer_has(module)), torch.optim.AdamW,
                                 reduce_gradients=True, lr=lr)
    return Trainer(module, optimizer, module.state_dict)


def zero_2(module, lr=0.01):
    optimizer = ShardedGradientOptimizer(groups_of(with_what_no_optimizer_has(module)),
                                         torch.optim.AdamW, bucket_mb=SMALL_MB, lr=lr)
    return Trainer(module, optimizer, module.state_dict, no_sync=optimizer.no_sync)


def zero_3(module, lr=0.01):
    model = FullyShardedModel(module)
    optimizer = torch.optim.AdamW(groups_of(model), lr=lr)
    return Trainer(model, optimizer, model.full_state_dict, no_sync=model.no_sync)


WAYS = (zero_1, zero_1_reducing, zero_2, zero_3)
ways = pytest.mark.parametrize("way", WAYS)


# --- training -------------------------------------------------------------------------------------

def two_numbers(seed):
    """Two parameters, of one element each: most ranks own none."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.AvgPool1d(INPUTS), nn.Linear(1, 1)).double()


MODELS = (Awkward, two_numbers)


def copy_of(state):
    return {name: tensor.detach().clone().cpu() for name, tensor in state.items()}


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(way, make):
    """Whole states after four steps at a falling rate, and after each of three more steps.

    Before these three is a restart, from what each rank has saved. They have three micro-batches:
    all are sent, or the last one alone. Also the bytes that their backwards sent.
    """
    def batches(steps):
        for step in steps:
            yield (mine(each).to(device)
                   for each in batch(step, 3 * LOCAL_BATCH * dist.get_world_size()))

    device = dplab.device()
    trainer = way(make(dist.get_rank()).to(device))
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, gamma=0.7)
    for x, y in batches(range(4)):
        trainer.optimizer.zero_grad()
        trainer.backward(x, y)
        trainer.sync()
        trainer.optimizer.step()
        scheduler.step()
    states, sent = [copy_of(trainer.state())], []

    saved = through_a_file((trainer.model.state_dict(), trainer.optimizer.state_dict()))
    trainer = way(make(1).to(device), lr=0.5)
    trainer.model.load_state_dict(saved[0])
    trainer.optimizer.load_state_dict(saved[1])
    for keeps_back, (x, y) in enumerate(batches([4, 5, 6])):
        trainer.optimizer.zero_grad(set_to_none=keeps_back < 2)
        with CallLog() as log:
            for number, part in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
                waits = keeps_back and number < 2
                with trainer.no_sync() if waits else contextlib.nullcontext():
                    trainer.backward(*part, share=1 / 3)
        sent.append(log.bytes("send") + log.bytes("reduce_scatter"))
        trainer.sync()
        trainer.optimizer.step()
        states.append(copy_of(trainer.state()))
    return states, sent


def train_alone(make, ranks):
    """The same states, by one process that has the whole batch at once."""
    trainer, states = alone(make(0)), []
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, gamma=0.7)
    for step in range(7):
        trainer.optimizer.zero_grad()
        trainer.backward(*batch(step, 3 * LOCAL_BATCH * ranks))
        trainer.optimizer.step()
        if step < 4:
            scheduler.step()
        if step > 2:
            states.append(copy_of(trainer.state()))
    return states


def train_models(way):
    return [train(way, make) for make in MODELS]


@pytest.mark.slow
@ways
@world_sizes
def test_trains_as_one_process_on_the_whole_batch(world_size, way):
    """AdamW in float64: tied, frozen and unequal parameters, two groups, a scheduler."""
    of_ranks = run_each(train_models, WAYS, world_size)[way]
    for make, results in zip(MODELS, zip(*of_ranks, strict=True), strict=True):
        phases = zip(*(states for states, _ in results), strict=True)
        for found, expected in zip(phases, train_alone(make, world_size), strict=True):
            assert_all_equal(found, expected, 1e-10)
        if way in (zero_2, zero_3):
            for _, (often, once, last) in results:
                assert often == 3 * once == 3 * last and (often > 0) == (world_size > 1)


@pytest.mark.gpu
@ways
def test_trains_as_one_process_on_gpus(way):
    test_trains_as_one_process_on_the_whole_batch(torch.cuda.device_count(), way)


def train_branches(way, apart):
    """The second step's gradients come from two backwards, of which the first is kept back.

    ``apart``: ranks use different branches. ZeRO-3 cannot do that: all ranks run the same units.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer, own = way(Branches(ranks)), rank * apart
    for backwards in ([own], [own, (own + 1) % ranks]):
        trainer.optimizer.zero_grad()
        for number, branch in enumerate(backwards, start=1):
            keeps_back = number < len(backwards)
            with trainer.no_sync() if keeps_back else contextlib.nullcontext():
                x, y = map(mine, batch(branch, LOCAL_BATCH * ranks))
                F.mse_loss(trainer.model(x, branch), y).backward()
        trainer.optimizer.step()
    return copy_of(trainer.state())


@pytest.mark.parametrize(("apart", "some"), [(1, (zero_1_reducing, zero_2)), (0, (zero_2, zero_3))])
def test_a_parameter_that_nobody_used_is_left_alone(apart, some):
    ranks, expected = 3, alone(Branches(3))
    for turns in (1, 2):
        expected.optimizer.zero_grad()
        for rank in range(ranks):
            for branch in [rank * apart, (rank * apart + 1) % ranks][:turns]:
                x, y = (each.chunk(ranks)[rank] for each in batch(branch, LOCAL_BATCH * ranks))
                (F.mse_loss(expected.model(x, branch), y) / ranks).backward()
        expected.optimizer.step()
    wanted = copy_of(expected.state())
    assert torch.equal(wanted["branches.3.weight"], Branches(ranks).branches[-1].weight)
    for way in some:
        assert_all_equal(run(train_branches, ranks, way, apart), wanted, 1e-12)


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(),
                         nn.Linear(5, OUTPUTS)).double()


def go_on_after_a_failure(way):
    """A forward and a backward that fail half-way, a step that is skipped, and then a step."""
    def fail(*_):
        raise KeyError("half-way")

    def fail_in_backward(module, inputs, output):
        output.register_hook(fail)

    module = perceptron(dist.get_rank())
    trainer = way(module)
    for register, hook in ((module[2].register_forward_pre_hook, fail),
                           (module[2].register_forward_hook, fail_in_backward)):
        handle = register(hook)
        with pytest.raises(KeyError, match="half-way"):
            trainer.backward(*batch(0, 2))
        handle.remove()
        trainer.optimizer.zero_grad()
    trainer.backward(*batch(0, 2))
    for step in range(2):
        trainer.optimizer.zero_grad()
        trainer.backward(*map(mine, batch(step, LOCAL_BATCH * 2)))
        trainer.optimizer.step()
    return copy_of(trainer.state())


def test_a_failed_step_leaves_nothing_behind():
    expected = alone(perceptron())
    for step in range(2):
        expected.optimizer.zero_grad()
        expected.backward(*batch(step, LOCAL_BATCH * 2))
        expected.optimizer.step()
    for results in run_each(go_on_after_a_failure, WAYS[1:], 2).values():
        assert_all_equal(results, copy_of(expected.state()), 1e-12)


# --- memory and bytes -----------------------------------------------------------------------------

def elements(tensors):
    """How many elements the tensors' storages hold; one that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size()
                for t in tensors if t is not None}
    return sum(storages.values())


def held_and_sent(way):
    """Elements of parameters, of gradients after backward, of state and of pieces; bytes sent."""
    trainer = way(perceptron())
    for step in range(2):
        trainer.optimizer.zero_grad()
        with CallLog() as log:
            trainer.backward(*map(mine, batch(step, LOCAL_BATCH * dist.get_world_size())))
            trainer.sync()
            gradients = elements(p.grad for p in [*trainer.model.parameters(), *trainer.parts])
            trainer.optimizer.step()
    state = [t for of_piece in trainer.optimizer.state.values() for t in of_piece.values()
             if torch.is_tensor(t) and t.dim()]
    return (elements(trainer.model.parameters()), gradients, sum(t.numel() for t in state),
            sum(p.numel() for p in trainer.parts), sum(map(sent_bytes, log.calls)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_its_share_and_sends_as_the_paper_says(ranks):
    total = sum(p.numel() for p in perceptron().parameters())
    share, padding = math.ceil(total / ranks), 6 * ranks
    factors = dict(zip(WAYS, (3, 2, 2, 3), strict=True))
    for way, results in run_each(held_and_sent, WAYS, ranks, backend="gloo").items():
        assert sum(pieces for *_, pieces, _ in results) == total
        for parameters, gradients, state, pieces, sent in results:
            assert pieces <= share + 10, way
            assert state == 2 * pieces, way
            assert parameters <= (share + 10 if way is zero_3 else total + padding), way
            assert gradients <= (share + 10 if way in (zero_2, zero_3) else total + padding), way
            moved = factors[way] * (ranks - 1) / ranks * 8 * total
            assert moved <= sent < 1.12 * moved, way


# --- as optimizers --------------------------------------------------------------------------------

def adamw_for(*sizes):
    return ShardedOptimizer(nn.Linear(*sizes).parameters(), torch.optim.AdamW, lr=0.01)


def test_a_state_that_does_not_fit_is_refused():
    states = run(lambda: adamw_for(7, 5).state_dict(), 3)
    of_all = torch.optim.AdamW(nn.Linear(7, 5).parameters()).state_dict()

    def load():
        rank = dist.get_rank()
        after, own = (rank + 1) % 3, states[rank]
        cases = [("of a whole one", of_all, (7, 5)), ("other parameters", own, (5, 7)),
                 (f"of rank {after}, not of rank {rank}", states[after], (7, 5))]
        if dist.get_world_size() == 2:
            cases = [("saved on 3 ranks, and there are 2 now", own, (7, 5))]
        for words, state, sizes in cases:
            with pytest.raises(ValueError, match=words):
                adamw_for(*sizes).load_state_dict(state)

    run(load, 3)
    run(load, 2)


def as_an_optimizer():
    for kind, options in ((ShardedOptimizer, {"reduce_gradients": True}),
                          (ShardedGradientOptimizer, {})):
        optimizer = kind(perceptron().parameters(), torch.optim.AdamW, lr=0.1, **options)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        more = nn.Linear(3, 3)
        optimizer.add_param_group({"params": more.parameters(), "lr": 0.0})
        before = more.weight.detach().clone()
        loss = optimizer.step(lambda more=more: more.weight.sum().square())
        assert loss.item() == before.sum().square().item() and torch.equal(more.weight, before)

        words = nn.Embedding(10, 3, sparse=True)
        optimizer = kind(words.parameters(), torch.optim.SGD, lr=0.1, **options)
        with pytest.raises(NotImplementedError, match="sparse=False"):
            words(torch.tensor([1])).sum().backward()
            optimizer.step()
    with pytest.raises(ValueError, match="more than 0 MiB"):
        ShardedGradientOptimizer(more.parameters(), torch.optim.SGD, bucket_mb=0, lr=0.1)


def test_they_are_optimizers_with_groups_and_closures():
    run(as_an_optimizer, 2)

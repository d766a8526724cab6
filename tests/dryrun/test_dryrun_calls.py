"""Dry runs as their caller meets them: nothing stays behind, and errors name the line."""


import functools

import pytest
import torch
import torch.distributed as dist
from small_transformers import GPT
from torch import nn

from dplab import RankError, dryrun


def rows():
    return torch.zeros(32, 64)


def test_two_runs_are_equal_and_nothing_remains_in_this_process():
    first, second = (dryrun.fully_shard(GPT, 3) for _ in range(2))
    assert first.samples == second.samples
    assert not dist.is_initialized()


def test_a_process_group_that_is_there_is_left_alone(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1,
                            store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        dryrun.ddp(GPT, 5)
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


class Sorter(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.layer, self.question = nn.Linear(64, 64), question

    def forward(self, x):
        x = self.layer(x)
        if self.question == "item" and x.sum().item() > 0:
            return -x
        if self.question == "nonzero":
            return x[x.nonzero()[:, 0]]
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize(("strategy", "question", "operator", "line"), [
    (functools.partial(dryrun.fully_shard, units="root"), "item", "_local_scalar_dense",
     "x.sum().item()"), (dryrun.ddp, "nonzero", "nonzero", "x.nonzero()")])
def test_a_question_about_values_names_the_operator_and_the_line(strategy, question, operator,
                                                                 line):
    with pytest.raises(dryrun.UnsupportedOperator, match=operator) as caught:
        strategy(lambda: Sorter(question), 4, inputs=rows)
    assert line in str(caught.value)
    assert "test_dryrun_calls.py" in str(caught.value)


def test_what_the_model_raises_is_shown_as_on_any_rank():
    with pytest.raises(RankError, match=r"test_dryrun_calls\.py, in forward"):
        dryrun.ddp(lambda: Sorter("shape"), 4, inputs=rows)


def one_layer():
    return nn.Linear(64, 64)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: dryrun.fully_shard(GPT, 0), ValueError, "world size is at least 1, not 0"),
    (lambda: dryrun.zero_1(GPT, True), TypeError, "world size is an integer"),
    (lambda: dryrun.fully_shard(GPT, 2, precision="fp8"), ValueError, "no precision 'fp8'"),
    (lambda: dryrun.fully_shard(GPT, 2, units="layers"), ValueError, "'blocks', 'root'"),
    (lambda: dryrun.fully_shard(GPT, 2, units=None), TypeError, "a class or a function"),
    (lambda: dryrun.fully_shard(GPT, 2, reshard_after_forward="yes"), TypeError, "True, False"),
    (lambda: dryrun.fully_shard(GPT, 8, shard_ranks=3), ValueError, "do not divide 8 ranks"),
    (lambda: dryrun.fully_shard(GPT, 2, sequence=65), ValueError, "positions for 64"),
    (lambda: dryrun.fully_shard(one_layer(), 2), TypeError, "makes an nn.Module"),
    (lambda: dryrun.fully_shard(one_layer, 2), TypeError, "needs inputs"),
    (lambda: dryrun.fully_shard(GPT, 2, inputs=rows), TypeError, "of your own"),
    (lambda: dryrun.ddp(GPT, 2, optimizer="adam"), TypeError, "optimizer is a class"),
    (lambda: dryrun.fully_shard(one_layer, 2, inputs=rows), ValueError, "no nn.ModuleList"),
    (lambda: dryrun.fully_shard(one_layer, 2, inputs=rows, units=nn.Conv2d), ValueError,
     "Conv2d"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()

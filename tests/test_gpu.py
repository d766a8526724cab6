"""What needs a GPU: ``pytest -n 0 -m gpu``. One GPU is enough; more are all used."""

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab import RankError, run
from dplab.checks import every_exercise
from dplab.checks.exercise import PASSED

pytestmark = pytest.mark.gpu


def all_reduced():
    tensor = torch.arange(5.0, device=dplab.device()) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return dist.get_backend(), str(dplab.device()), tensor


def test_every_gpu_gets_a_rank_and_tensors_come_back_on_the_cpu():
    count = torch.cuda.device_count()
    for rank, (backend, device, tensor) in enumerate(run(all_reduced, count)):
        assert (backend, device) == ("nccl", f"cuda:{rank}")
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, torch.arange(5.0) * sum(range(1, count + 1)))


def test_more_ranks_than_gpus_fall_back_to_gloo():
    count = torch.cuda.device_count() + 1
    assert {(backend, device) for backend, device, _ in run(all_reduced, count)} == {
        ("gloo", "cpu")}
    with pytest.raises(ValueError, match="needs a GPU for every rank"):
        run(all_reduced, count, backend="nccl")


def test_ranks_start_after_the_notebook_has_used_the_gpu():
    model = torch.nn.Linear(8, 3).cuda()
    model(torch.ones(2, 8, device="cuda")).sum().backward()

    def step():
        replica = model.to(dplab.device())
        ddp = torch.nn.parallel.DistributedDataParallel(replica, device_ids=[dplab.device()])
        ddp(torch.ones(2, 8, device=dplab.device())).sum().backward()
        return replica.weight.grad

    assert torch.allclose(run(step, 1)[0], model.weight.grad.cpu())


def test_a_failing_rank_is_named_under_nccl():
    def fails():
        dist.all_reduce(torch.ones(3, device=dplab.device()))
        raise ValueError(f"on {dplab.device()}")

    with pytest.raises(RankError, match="raised ValueError: on cuda:") as caught:
        run(fails, torch.cuda.device_count())
    assert caught.value.kind == "raised"


@pytest.mark.parametrize("exercise", every_exercise(), ids=lambda exercise: exercise.slug)
def test_exercises_pass_beside_a_gpu(exercise):
    assert exercise.judge(exercise.solution).outcome == PASSED

"""The reader's own scheme: what holds of its bytes, and its place in the table."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab.checks import find
from dplab.checks.exercise import PASSED, WRONG
from dplab.exercises import byte_budget
from dplab.workloads.scheme_tasks import Trained


class Often:
    """All weights, in four bytes each."""

    every = 16

    def __init__(self, model, optimizer, steps):
        self.parameters, self.optimizer = list(model.parameters()), optimizer
        self.done, self.steps = 0, steps

    def step(self):
        self.optimizer.step()
        self.done += 1
        if self.done % self.every == 0 or self.done == self.steps:
            self.meet()

    @torch.no_grad()
    def meet(self):
        weights = parameters_to_vector(self.fragment()) / dist.get_world_size()
        dist.all_reduce(weights)
        vector_to_parameters(weights, self.fragment())

    def fragment(self):
        return self.parameters


class InFragments(Often):
    """A fourth of the weights each time, and at the end all."""

    def fragment(self):
        last = self.done == self.steps
        return self.parameters if last else self.parameters[self.done // self.every % 4::4]


class OfRank0(Often):
    """All ranks train, and at the end only rank 0's weights count."""

    every = 10_000

    @torch.no_grad()
    def meet(self):
        weights = parameters_to_vector(self.parameters)
        dist.broadcast(weights, src=0)
        vector_to_parameters(weights, self.parameters)


def test_another_scheme_passes_and_gets_its_place(monkeypatch):
    monkeypatch.setattr(byte_budget, "run", lambda *_, **__: [Trained(2.3, 6606.0, 0.0)])
    verdict = find("byte-budget").judge(InFragments)
    assert verdict.outcome == PASSED
    *_, own = (line for line in verdict.detail.splitlines() if "yours" in line)
    assert "2.300" in own and "6,606" in own and "one rank alone" in verdict.detail
    losses = [float(line.split()[0]) for line in verdict.detail.splitlines()[2:-1]]
    assert losses == sorted(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "said"), [
    (Often, "9 × all_reduce of float32"),
    (OfRank0, "that rank 1's samples change the weights")])
def test_what_is_wrong_with_a_scheme_is_said_with_what_it_sent(scheme, said):
    verdict = find("byte-budget").judge(scheme)
    assert verdict.outcome == WRONG
    assert said in verdict.detail, verdict

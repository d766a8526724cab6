"""The models that the tests of the course's own data parallelism train, and their batches.

The models start differently on every rank, no two inputs are equal, and few sizes divide.
"""

import torch
from torch import nn

INPUTS, OUTPUTS = 7, 5
SMALL_MB = 0.0005  # of a bucket, so that a small model has several


class Awkward(nn.Module):
    """Tied, frozen, non-contiguous and scalar parameters, without anything that mixes samples."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(INPUTS, 11, bias=False)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.back = nn.Linear(13, 11)
        self.back.bias.requires_grad_(False)  # among trainable ones
        self.decode = nn.Linear(11, INPUTS)
        self.again = nn.Linear(INPUTS, 11, bias=False)
        self.again.weight = self.encode.weight
        self.head = nn.Linear(11, OUTPUTS)
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("shift", torch.randn(OUTPUTS))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.frozen(self.encode(x)))
        hidden = self.decode(torch.tanh(self.back(hidden @ self.turned)))
        return self.scale * self.head(self.again(hidden)) + self.shift


class Branches(nn.Module):
    """Rank r uses branch r, and nobody uses the last one."""

    def __init__(self, ranks):
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(INPUTS, 4)
        self.branches = nn.ModuleList([nn.Linear(4, OUTPUTS) for _ in range(ranks + 1)])
        self.double()

    def forward(self, x, branch):
        return self.branches[branch](self.shared(x))


def batch(step, samples):
    """Inputs (samples, INPUTS) and targets (samples, OUTPUTS) in float64."""
    generator = torch.Generator().manual_seed(5000 + step)
    return tuple(torch.randn(samples, size, generator=generator, dtype=torch.float64)
                 for size in (INPUTS, OUTPUTS))


def assert_all_equal(states, expected, tolerance=1e-12):
    """Each rank's tensors, by name, are the expected ones; None stands for None."""
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert (state[name] is None) == (value is None), (rank, name)
            if value is not None:
                torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance,
                                           msg=lambda m, at=(rank, name): f"{at}: {m}")

"""The digits and the source of the library: what they are, and that they never change."""

import pytest
import sklearn.datasets
import torch
from torch.nn import functional as F

from dplab.workloads.digits import (
    TRAIN_SIZE,
    accuracy,
    digits_classifier,
    load_digits,
)
from dplab.workloads.standard_library import load_source, sample


def test_digits_are_those_of_scikit_learns_own_loader_in_a_fixed_order():
    digits, bunch = load_digits(), sklearn.datasets.load_digits()
    assert len(digits.train_images) == TRAIN_SIZE == 1439  # a prime
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([digits.train_images, digits.test_images]) * 16,
                       torch.from_numpy(bunch.images).float()[order])
    assert torch.equal(torch.cat([digits.train_labels, digits.test_labels]),
                       torch.from_numpy(bunch.target)[order])


def test_the_classifier_is_seeded_without_touching_the_callers_random_state():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    zero, same, other = digits_classifier(), digits_classifier(0), digits_classifier(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(zero[1].weight, same[1].weight)
    assert not torch.allclose(zero[1].weight, other[1].weight)
    assert sum(p.numel() for p in zero.parameters()) == 16_903
    assert zero(torch.rand(3, 8, 8)).shape == (3, 10)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_classifier_reaches_97_percent(one_thread):
    digits = load_digits()
    model = digits_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    assert accuracy(model, *digits[2:]) < 0.3
    for _ in range(300):
        chosen = torch.randint(TRAIN_SIZE, (240,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen]).backward()
        optimizer.step()
    assert accuracy(model, *digits[2:]) > 0.97
    assert model.training


def test_accuracy_counts_in_eval_mode_and_restores_the_mode():
    class Echo(torch.nn.Module):
        def forward(self, x):
            assert not self.training and not torch.is_grad_enabled()
            return x

    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.5, 0.4]])
    model = Echo()
    assert abs(accuracy(model, logits, torch.tensor([1, 0, 1])) - 2 / 3) < 1e-6
    assert model.training
    assert accuracy(model.eval(), logits, torch.tensor([1, 0, 0])) == 1.0
    assert not model.training


def test_the_standard_library_is_bytes_of_python_source():
    source = load_source()
    assert source.dtype == torch.uint8 and len(source) > 1_000_000
    text = bytes(source.tolist())
    assert b"\nimport " in text and text.count(b"\ndef ") > 100
    source.zero_()
    assert load_source().any()


def test_samples_are_windows_and_the_same_for_the_same_seed():
    source = torch.arange(200, dtype=torch.uint8)
    before = torch.random.get_rng_state()
    inputs, targets = sample(source, batch=64, length=7, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert inputs.shape == targets.shape == (64, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, sample(source, 64, 7, seed=3)[0])
    assert not torch.equal(inputs, sample(source, 64, 7, seed=4)[0])
    first, _ = sample(source[:8], batch=3, length=7, seed=0)
    assert torch.equal(first, torch.arange(7).expand(3, 7))

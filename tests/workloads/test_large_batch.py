"""The schedule of the learning rate, the fit of steps against samples, and the data."""

import pytest
import torch

from dplab.workloads import large_batch, moved_digits
from dplab.workloads.digits import load_digits


def test_the_rate_rises_in_a_line_and_falls_as_a_cosine():
    rate = [large_batch.learning_rate(progress, 0.1, 0.8, 0.2)
            for progress in (0, 0.1, 0.2, 0.6, 1)]
    assert rate == pytest.approx([0.1, 0.45, 0.8, 0.4, 0.0])
    assert large_batch.learning_rate(0, 0.1, 0.8, 0) == pytest.approx(0.8)


def test_moved_digits_are_the_digits_moved():
    data, digits = moved_digits.load_moved_digits(), load_digits()
    assert data.train_images.shape == (8192, 12, 12) and data.test_images.shape == (4096, 12, 12)
    assert data.train_images.mean().abs() < 1e-4 and abs(data.train_images.std() - 1) < 1e-4
    ground = data.train_images.min()
    pixels = (data.train_images[:200] - ground) / (data.train_images.max() - ground)
    windows = pixels.unfold(1, 8, 1).unfold(2, 8, 1)  # (samples, 5, 5, 8, 8): each place
    at = (windows - digits.train_images[:200, None, None]).abs().amax((3, 4)) < 1e-4
    assert at.any(2).any(1).all() and at.any(0).all()
    assert torch.allclose(pixels.sum((1, 2)), digits.train_images[:200].sum((1, 2)), rtol=1e-3)
    assert torch.equal(data.train_labels[1439:2878], digits.train_labels)

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


def test_the_front_is_found_again():
    steps = {2**power: 60 * (1 + 250 / 2**power) for power in range(3, 13)}
    least_steps, least_samples = large_batch.least_steps_and_samples(steps)
    assert least_steps == pytest.approx(60, rel=0.01)
    assert least_samples == pytest.approx(60 * 250, rel=0.01)


def test_moved_digits_are_the_digits_moved():
    data, digits = moved_digits.load_moved_digits(), load_digits()
    assert data.train_images.shape == (8192, 12, 12) and data.test_images.shape == (4096, 12, 12)
    assert data.train_images.mean().abs() < 1e-4 and abs(data.train_images.std() - 1) < 1e-4
    places = set()
    ground = data.train_images.min()
    unit = (data.train_images.max() - ground) / digits.train_images.max()
    for index in range(200):
        pixels = (data.train_images[index] - ground) / unit
        fits = [(row, column) for row in range(5) for column in range(5)
                if torch.allclose(pixels[row:row + 8, column:column + 8],
                                  digits.train_images[index], atol=1e-4)]
        assert fits and torch.isclose(pixels.sum(), digits.train_images[index].sum(), rtol=1e-3)
        places.update(fits)
    assert len(places) == 25
    assert torch.equal(data.train_labels[1439:2878], digits.train_labels)

"""The digits, each at some place of a larger image: a task that a small model learns slowly.

Every image of `load_digits` is 8×8 pixels; here it lies anywhere on 12×12, so the classifier has to
find the digit, too. Each digit comes five or six times for training, and eleven or twelve times for
testing; no digit is in both sets. 8,192 is a power of two, which many batch sizes divide.
"""

import torch
from torch import nn

from dplab.workloads.digits import Digits, load_digits, perceptron

TRAIN_SIZE = 8192
TEST_SIZE = 4096
SIDE = 12


def load_moved_digits() -> Digits:
    """Images of mean 0 and deviation 1, float32 of (samples, 12, 12); labels int64, (samples,).

    Always the same ones: their places are drawn with fixed seeds, and the caller's random state
    is left alone.
    """
    digits = load_digits()
    train, train_labels = _moved(digits.train_images, digits.train_labels, TRAIN_SIZE, seed=1)
    test, test_labels = _moved(digits.test_images, digits.test_labels, TEST_SIZE, seed=2)
    mean, deviation = train.mean(), train.std()
    return Digits((train - mean) / deviation, train_labels,
                  (test - mean) / deviation, test_labels)


def moved_digits_classifier(seed: int = 0) -> nn.Sequential:
    """A perceptron with two hidden layers: (samples, 12, 12) to logits of shape (samples, 10).

    It has 27,466 parameters. ``seed`` decides the initial values; the caller's random state is
    left alone.
    """
    return perceptron(seed, SIDE**2, 128, 64, 10)


def _moved(images, labels, samples, seed):
    """As many images as asked for, digit after digit, each at a random place on the larger one."""
    generator = torch.Generator().manual_seed(seed)
    digit = torch.arange(samples) % len(images)
    corner = torch.randint(SIDE - 8 + 1, (samples, 2), generator=generator)
    rows, columns = (corner[:, i, None] + torch.arange(8) for i in (0, 1))
    moved = torch.zeros(samples, SIDE, SIDE)
    moved[torch.arange(samples)[:, None, None], rows[:, :, None], columns[:, None]] = images[digit]
    return moved, labels[digit]

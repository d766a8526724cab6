"""Handwritten digits, 8×8 pixels, and a classifier for them. Nothing is downloaded.

The images ship with scikit-learn: 1,797 digits, the test set of Alpaydin and Kaynak, "Optical
Recognition of Handwritten Digits" (UCI, 1998, https://doi.org/10.24432/C50P49).

Sizes are prime on purpose: no world size above 1 divides the training set or the parameters, so
code that is right only when everything divides fails here.
"""

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

TRAIN_SIZE = 1439
TEST_SIZE = 358
_BRIGHTEST = 16  # scikit-learn's pixels are whole numbers from 0 to 16


class Digits(NamedTuple):
    """Images are float32 in [0, 1], of shape (samples, 8, 8); labels are int64, (samples,)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits() -> Digits:
    """1,439 digits for training and 358 for testing, on the CPU, always the same ones.

    The order is shuffled with a fixed seed before the split, since neighbours in the file come
    from the same writer; so the test set has no writers of its own. The caller's random state is
    left alone.
    """
    rows = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)  # the pixels, and the label
    order = torch.randperm(TRAIN_SIZE + TEST_SIZE, generator=torch.Generator().manual_seed(0))
    table = torch.from_numpy(rows)[order]
    images = table[:, :-1].reshape(-1, 8, 8).float() / _BRIGHTEST
    labels = table[:, -1].long()
    train, test = slice(TRAIN_SIZE), slice(TRAIN_SIZE, None)
    return Digits(images[train].clone(), labels[train].clone(),
                  images[test].clone(), labels[test].clone())


def _file():
    """In scikit-learn's folder: its own loader takes a second, most of it imports, on each rank."""
    package = find_spec("sklearn")
    if package is None:
        raise ModuleNotFoundError("the digits ship with scikit-learn: pip install scikit-learn",
                                  name="sklearn")
    return Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"


def digits_classifier(seed: int = 0) -> nn.Sequential:
    """A perceptron with two hidden layers: (samples, 8, 8) to logits of shape (samples, 10).

    It has 16,903 parameters in 6 tensors. ``seed`` decides the initial values; the caller's
    random state is left alone.
    """
    return perceptron(seed, 64, 131, 59, 10)


def perceptron(seed: int, *sizes: int) -> nn.Sequential:
    """Linear layers from each size to the next, with GELU between them, for images of any shape."""
    # GELU, not ReLU: at a kink, a rounding error decides whether a unit takes part at all, and two
    # runs that differ only in the order of a sum drift apart.
    layers: list[nn.Module] = [nn.Flatten()]
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of ``images`` whose largest logit is at their label, from 0 to 1.

    ``model`` is evaluated in eval mode and left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    predictions = model(images).argmax(dim=1)
    model.train(was_training)
    return (predictions == labels).float().mean().item()

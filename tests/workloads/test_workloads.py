"""The models and the data that chapters share: what they are, and that they never change."""

import time
from dataclasses import replace

import pytest
import sklearn.datasets
import torch
from small_transformers import GPT, LLAMA
from torch.nn import functional as F

import dplab
from dplab.measure import EmulatedLink, aligned, split_time
from dplab.predict.catalogue import MODELS
from dplab.workloads import moved_digits
from dplab.workloads.digits import TRAIN_SIZE, accuracy, digits_classifier, load_digits
from dplab.workloads.slept_steps import Parts, Sizes, Worker, traced_steps
from dplab.workloads.standard_library import load_source, sample
from dplab.workloads.transformer import Transformer, rotated, rotation_table

# --- data -----------------------------------------------------------------------------------------

def test_digits_are_those_of_scikit_learns_own_loader_in_a_fixed_order():
    digits, bunch = load_digits(), sklearn.datasets.load_digits()
    assert len(digits.train_images) == TRAIN_SIZE == 1439  # a prime
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([digits.train_images, digits.test_images]) * 16,
                       torch.from_numpy(bunch.images).float()[order])
    assert torch.equal(torch.cat([digits.train_labels, digits.test_labels]),
                       torch.from_numpy(bunch.target)[order])


def test_moved_digits_are_the_digits_moved():
    data, digits = moved_digits.load_moved_digits(), load_digits()
    assert data.train_images.shape == (8192, 12, 12) and data.test_images.shape == (4096, 12, 12)
    assert data.train_images.mean().abs() < 1e-4 and abs(data.train_images.std() - 1) < 1e-4
    ground = data.train_images.min()
    pixels = (data.train_images[:200] - ground) / (data.train_images.max() - ground)
    windows = pixels.unfold(1, 8, 1).unfold(2, 8, 1)  # (samples, 5, 5, 8, 8): each place
    at = (windows - digits.train_images[:200, None, None]).abs().amax((3, 4)) < 1e-4
    assert at.any(2).any(1).all() and at.any(0).all()
    assert torch.equal(data.train_labels[1439:2878], digits.train_labels)


def test_samples_are_windows_of_python_source_and_the_same_for_the_same_seed():
    text = bytes(load_source().tolist())
    assert len(text) > 1_000_000 and b"\nimport " in text and text.count(b"\ndef ") > 100
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


# --- models ---------------------------------------------------------------------------------------

def test_the_classifier_is_seeded_and_reaches_97_percent():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = torch.random.get_rng_state()
    model, same, other = digits_classifier(), digits_classifier(0), digits_classifier(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(model[1].weight, same[1].weight)
    assert not torch.allclose(model[1].weight, other[1].weight)
    assert sum(p.numel() for p in model.parameters()) == 16_903
    assert sum(p.numel() for p in moved_digits.moved_digits_classifier().parameters()) == 27_466

    digits = load_digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        chosen = torch.randint(TRAIN_SIZE, (240,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen]).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    assert accuracy(model, *digits[2:]) > 0.97


def test_accuracy_counts_in_eval_mode_and_restores_the_mode():
    class Echo(torch.nn.Module):
        def forward(self, x):
            assert not self.training and not torch.is_grad_enabled()
            return x

    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.5, 0.4]])
    for model in (Echo(), Echo().eval()):
        was_training = model.training
        assert abs(accuracy(model, logits, torch.tensor([1, 0, 1])) - 2 / 3) < 1e-6
        assert model.training is was_training


@pytest.mark.parametrize("config", [GPT, LLAMA, MODELS["GPT-2"],
                                    replace(MODELS["Llama-3 70B"], layers=2)])
def test_the_model_has_the_parameters_that_are_predicted(config):
    with torch.device("meta"):
        model = Transformer(config)
    block = sorted(tuple(parameter.shape) for parameter in model.blocks[0].parameters())
    assert block == sorted(config.block.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["GPT", "Llama"])
def test_no_position_sees_a_later_one(config):
    torch.manual_seed(0)
    model, tokens = Transformer(config), torch.randint(101, (2, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 101
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:12].max() < 1e-6 < 1e-4 < difference[12:].min()
    if config is GPT:
        with pytest.raises(ValueError, match="65 tokens, and learned positions for 64"):
            model(torch.zeros(1, 65, dtype=torch.int64))


def test_rotary_attention_depends_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    table = rotation_table(10, 8, "cpu", torch.float64)
    queries, keys = (rotated(vector.expand(1, 10, 1, 8), table)[0, :, 0] for vector in (query, key))
    scores = queries @ keys.T
    assert scores[7, 4] == pytest.approx(scores[3, 0].item())
    assert scores[7, 4] != pytest.approx(scores[7, 3].item())


# --- steps ----------------------------------------------------------------------------------------

SIZES = Sizes(layers=3, forward=0.004, backward=0.010, optimizer=0.005, bucket_bytes=4000,
              batches=7)


@pytest.mark.slow
def test_a_step_has_a_kernel_for_each_layer_and_a_call_for_each_bucket():
    ranks = dplab.run(traced_steps, 2, Parts(), SIZES, backend="gloo", link=EmulatedLink(1e6))
    assert [len(steps) for steps in ranks] == [3, 3]  # 7 batches for 2 ranks; one is left over
    for step in list(zip(*ranks, strict=True))[1:]:
        for spans in aligned(step):
            names = [span.name for span in spans]
            assert [names.count(name) for name in ("data", "forward", "backward", "all_reduce",
                                                   "optimizer")] == [1, 3, 3, 3, 1]
        for kinds in split_time(aligned(step)):
            assert kinds["computing"] == pytest.approx(0.047, rel=0.3)
            assert kinds["exposed"] >= 0.003  # the last bucket: 4000 bytes at 1e6 a second


def test_a_sleep_that_was_too_long_shortens_the_next_one():
    worker = Worker(SIZES)
    worker._late = 0.400
    begin = time.monotonic()
    worker.kernel("forward", 0.405)
    assert time.monotonic() - begin < 0.300

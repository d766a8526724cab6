"""The bench of a GPU's kernels, run small on the CPU; with ``-n 0 -m gpu`` whole, on a GPU."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from dplab.bench import gpu, results
from dplab.predict import kernels, rates
from dplab.predict.catalogue import GPUS, Gpu
from dplab.predict.pace import PACES
from dplab.predict.transformer_config import TransformerConfig

CPU = torch.device("cpu")
SMALL = TransformerConfig(2, 64, 2, 96, 128, 128, kv_heads=1, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)


def _options(*arguments):
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(scope="module")
def tables():
    return gpu.measured_tables("mine", CPU, [SMALL], tokens=64, width=64, vocabulary=128,
                               compiled=False, rounds=1)


def test_the_products_of_a_block_are_measured_as_they_are_predicted():
    assert gpu.layer_shapes(SMALL, 64) == [
        (64, 64, 64), (64, 32, 64), (64, 96, 64), (64, 64, 96),  # forward
        (64, 64, 32), (32, 64, 64), (96, 64, 64)]  # and of the gradients, what is not there yet


def test_measured_tables_are_rates_of_every_kernel_of_a_block(tables):
    best = gpu.own_peaks(tables)
    mine = Gpu("mine", memory_bytes=1e9, **best)
    for table in tables:
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) and row[-1] > 0 for row in table["rows"])
        table["peak"] = {"TFLOP/s": best["bf16_flops"] / 1e12,
                         "GB/s": best["memory_bandwidth"] / 1e9}.get(table["columns"][-1])
    own = rates.Rates(json.loads(json.dumps(tables)))
    assert own.memory(mine, "norm").as_asked
    assert own.attention(mine, 64, 64).as_asked
    measured = [1e12 * row[-1] for table in tables if table["what"] == "matmul"
                for row in table["rows"]]
    assert min(measured) <= own.matmul(mine, 64, 64, 64).value <= max(measured)
    assert gpu.predicted(SMALL, 1, 64, mine, False, "cuDNN", own) > 0
    assert kernels.optimizer_seconds(1000, mine, rates=own, fused=False) > 0


def test_memory_bound_rows_carry_their_bytes_and_time(tables):
    for operation, kind, elements, nbytes, milliseconds, rate in tables[2]["rows"]:
        assert rate == pytest.approx(elements * nbytes / (milliseconds / 1e3) / 1e9, rel=0.2,
                                     abs=0.05), operation
        assert kind in rates.KINDS
    operations = {row[0] for row in tables[2]["rows"]}
    assert operations >= {"norm", "norm backward", "loss", "loss backward", "optimizer"}


def test_a_real_block_is_timed_forward_and_backward():
    short, long = (gpu.block_seconds(SMALL, batch, 128, CPU, rounds=5) for batch in (1, 32))
    assert 0 < short < long


def test_a_card_is_found_in_the_catalogue_by_its_name():
    assert gpu.in_catalogue("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert gpu.in_catalogue("NVIDIA A100-SXM4-40GB") is GPUS["A100"]
    assert gpu.in_catalogue("NVIDIA GeForce RTX 4090") is None


@pytest.mark.slow
def test_measured_and_predicted_blocks_stand_side_by_side(capsys):
    card = "NVIDIA H100 80GB HBM3"
    found = gpu.measure(_options("--models", "GPT-2", "--block", "GPT-2", "--sequence", "64",
                                 "--eager"), CPU, card, 8e10)
    (row,) = found["blocks"]
    assert list(row) == ["compiled", "measured", "attention", "own", *PACES]
    assert row["slow"] > row["typical"] > row["fast"]
    assert all(table["gpu"] == card for table in found["tables"])
    assert found["peaks"]["TFLOP/s"] == GPUS["H100"].bf16_flops / 1e12
    printed = capsys.readouterr().out
    assert f"{1e3 * row['measured']:.2f}" in printed
    json.dumps(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line_and_fails():
    done = subprocess.run([sys.executable, "-m", "dplab.bench", "gpu"], capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "CUDA" in done.stderr


@pytest.mark.gpu
def test_the_whole_bench_on_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    gpu.main(_options("--save"))
    (path,) = tmp_path.glob("gpu_*.json")
    found = json.loads(path.read_text())
    for row in found["blocks"]:
        assert row["own"] == pytest.approx(row["measured"], rel=0.25)
    assert found["memory"]["dry_run"] == pytest.approx(found["memory"]["measured"], rel=0.03)
    assert rates.Rates(found["tables"])
    assert "predicted" in capsys.readouterr().out

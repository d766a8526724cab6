"""The results in chapters/data: each is what its script makes of it, and each script runs here."""

import json
import math
import statistics
import sys
from dataclasses import asdict, replace

import cloudpickle
import eight_ranks
import gpu_ranks
import gpu_step
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
import unsent
import zero_stages
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dplab
from dplab.bench import results
from dplab.exercises.attribute_the_loss import length, lost_gpus, recorded_job
from dplab.exercises.sparse_average import sparse_average
from dplab.exercises.what_ddp_sends import what_ddp_sends
from dplab.parallel import DiLoCo, LocalSGD, ParameterServer, StreamingDiLoCo
from dplab.parallel.local_sgd import average_tensors
from dplab.parallel.parameter_server import train_as_worker
from dplab.workloads import moved_digits
from dplab.workloads.large_batch import OPTIMIZERS
from dplab.workloads.scheme_tasks import DIGITS, LANGUAGE, RANKS, train

cloudpickle.register_pickle_by_value(eight_ranks)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FOLDER = results.FOLDER


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_name_what_made_them(path):
    found = recorded(path.stem)
    assert found["torch"] and found["command"].startswith("python ")
    script = FOLDER / f"{path.stem}.py"
    assert ("dplab.bench gpu" if path.stem.startswith("gpu_nvidia") else
            f"chapters/data/{script.name}") in found["command"]
    assert script.exists() or "dplab.bench" in found["command"]


def test_zero_stages_are_all_of_deepspeed():
    assert [row["name"] for row in recorded("zero_stages")["rows"]] == list(zero_stages.DEEPSPEED)


# Chapter 06's eight ranks


def test_the_losses_of_the_eight_ranks_are_found_as_they_were_put_in():
    file, path = recorded("eight_ranks"), FOLDER / "eight_ranks.json"
    assert file["sizes"] == asdict(eight_ranks.SIZES)
    assert file["put_in"] == pytest.approx(eight_ranks.lost())
    alone, ranks = recorded_job(path)
    found, speed_up = lost_gpus(alone, ranks), 8 * length([alone]) / length(ranks)
    assert speed_up == pytest.approx(5, abs=0.15)
    assert sum(found.values()) == pytest.approx(8 - speed_up, abs=0.05)
    for cause, seconds in eight_ranks.lost().items():
        assert found[cause] == pytest.approx(8 * seconds / length(ranks), abs=0.15), cause
    # A repair returns something else than its share of the timeline.
    usual = {cause: statistics.median(steps) for cause, steps in file["repaired"].items()}
    saved = {cause: (usual["nothing"] - usual[cause]) / seconds
             for cause, seconds in eight_ranks.lost().items()}
    assert saved["data"] == pytest.approx(1, rel=0.1) and saved["kernels"] < 0.2
    assert saved["straggler"] < 0.6 and saved["exposed"] < 0.75


@pytest.mark.slow
def test_the_eight_ranks_run_on_this_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name in ("STEPS", "REPAIRED_STEPS", "WARM_UP"):
        monkeypatch.setattr(eight_ranks, name, 1)
    eight_ranks.main()
    assert "times as fast" in capsys.readouterr().out
    file, sizes = json.loads((tmp_path / "eight_ranks.json").read_text()), eight_ranks.SIZES
    assert file.keys() == recorded("eight_ranks").keys()
    [[alone]], [together] = file["alone"], file["together"]
    assert "communication" not in {lane for _, lane, *_ in alone} and len(together) == 8
    for rank, spans in enumerate(together):
        slow = eight_ranks.STRAGGLER / 16 if rank == eight_ranks.SLOW_RANK else 0
        for name, least in (("forward", sizes.forward + slow),
                            ("backward", sizes.backward + eight_ranks.KERNELS + slow)):
            seconds = [end - start for each, _, start, end in spans if each == name]
            assert len(seconds) == sizes.layers and statistics.median(seconds) >= least - 1e-3


# Recorded on GPUs


def test_the_files_of_gpus_are_of_their_scripts():
    assert recorded("gpu_step")["parameters"] == gpu_step.resnet50()
    assert sum(gpu_step.resnet50()) == 25_557_032  # torchvision's own count
    file = recorded("gpu_ranks")
    sizes = [2 * elements for _, elements in file["parameters"]]
    for rank in file["ranks"]:
        assert list(rank["all_reduce"]) == [*map(str, gpu_ranks.SIZES)]
        assert list(rank["caps"]) == [*map(str, gpu_ranks.CAPS)]
        assert list(rank["steps"]) == list(gpu_ranks.BATCHES)
        for run in rank["steps"].values():
            order = sorted(range(len(sizes)), key=run["ready"].__getitem__)
            assert [2 * elements for *_, elements in run["trace"]["collectives"]
                    ] == what_ddp_sends(sizes, order, iteration=9)


def event(name, category, start, duration, **args):
    return {"name": name, "cat": category, "ph": "X", "ts": 5e9 + start, "dur": duration,
            "args": args}


def test_a_trace_in_short():
    """Kernels that lie near each other are one; those launched before the step do not count."""
    phases = [event(name, "user_annotation", start, duration) for name, start, duration in (
        ("step", 10.0, 900.0), ("forward", 20.0, 30.0), ("backward", 60.0, 50.0))]
    launches = [event("cudaLaunchKernel", "cuda_runtime", start, 2.0, correlation=number)
                for number, start in enumerate((2.0, 30.0, 40.0, 70.0, 90.0))]
    kernels = [event(name, "kernel", start, duration, correlation=number)
               for number, (name, start, duration) in enumerate((
                   ("aten::mm", 12.0, 9.0), ("gemm", 130.0, 40.0), ("gelu", 175.0, 25.0),
                   ("gemm", 300.0, 50.0), ("ncclDevKernel_AllReduce", 310.0, 80.0)))]
    kernels[-1]["args"] |= {"Collective name": "allreduce", "In msg nelems": 77}
    short = gpu_ranks.in_short(sorted(phases + launches + kernels, key=lambda each: each["ts"]))
    assert short["compute"] == [["forward", 120.0, 70.0], ["backward", 290.0, 50.0]]
    assert short["collectives"] == [["allreduce", 300.0, 80.0, 80.0, 77]]
    assert short["cpu"] == [["forward", 10.0, 30.0], ["backward", 50.0, 50.0]]
    assert (short["step"], short["kernels"], short["queued"]) == (900.0, 3, 135.0)


# Chapter 07's training


def test_the_sweep_has_the_runs_that_the_script_makes(monkeypatch):
    """Their settings, in this order, from their own results."""
    file = recorded("training")
    assert file["seeds"] == list(training.SEEDS) and file["epochs"] == training.EPOCHS

    def run(optimizer, batch, base, peak, seeds, warm_up=training.WARM_UP):
        [found] = [row for row in file["rules"] if math.isclose(row["learning_rate"], peak) and (
            row["optimizer"], row["batch"], row["warm_up"]) == (optimizer, batch, warm_up)]
        return {key: value for key, value in found.items() if key != "times"}

    def steps(batch, rate, seeds, patience):
        found = {row["target"]: row["steps"] for row in file["steps_to_targets"]
                 if row["batch"] == batch and math.isclose(row["learning_rate"], rate)}
        assert all(each is None or each <= patience for each in found[min(training.TARGETS)])
        return found

    monkeypatch.setattr(training, "_run", run)
    monkeypatch.setattr(training, "_steps", steps)
    again = [row for optimizer in OPTIMIZERS for row in training.rules(optimizer)]
    assert [row | {"times": pytest.approx(row["times"])} for row in again] == file["rules"]
    assert [row | {"learning_rate": pytest.approx(row["learning_rate"])}
            for row in training.steps_to_targets()] == file["steps_to_targets"]


@pytest.mark.slow
def test_a_recorded_run_comes_out_again():
    row = next(row for row in recorded("training")["rules"] if (
        row["optimizer"], row["batch"], row["times"]) == ("SGD", 2048, 4.0))
    rate = row["learning_rate"]
    [error], [loss] = training.train("SGD", 2048, rate / 4, rate, seeds=[0])
    assert 100 * error == pytest.approx(row["errors"][0], abs=3)
    assert loss == pytest.approx(row["losses"][0], rel=0.05)


def two_epochs(optimizer, batch, base, peak, seed):
    """An ordinary loop with DDP; the test error and the test loss."""
    data, draws = moved_digits.load_moved_digits(), torch.Generator().manual_seed(seed)
    model = DistributedDataParallel(moved_digits.moved_digits_classifier(seed))
    stepper = {"SGD": lambda p: torch.optim.SGD(p, lr=base, momentum=0.9),
               "Adam": lambda p: torch.optim.Adam(p, lr=base)}[optimizer](model.parameters())
    order = torch.cat([torch.randperm(8192, generator=draws) for _ in range(2)]).split(batch)
    for step, indices in enumerate(order):
        done = step / len(order)
        stepper.param_groups[0]["lr"] = (
            base + (peak - base) * 4 * done if done < 0.25
            else peak * (0.5 + 0.5 * math.cos(math.pi * (done - 0.25) / 0.75)))
        mine = indices[dist.get_rank()::2]
        stepper.zero_grad()
        F.cross_entropy(model(data.train_images[mine]), data.train_labels[mine]).backward()
        stepper.step()
    with torch.no_grad():
        logits = model.module(data.test_images)
    return ((logits.argmax(1) != data.test_labels).float().mean().item(),
            F.cross_entropy(logits, data.test_labels).item())


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "base", "peak"), [("SGD", 0.05, 0.3), ("Adam", 1e-3, 4e-3)])
def test_seeds_side_by_side_are_ordinary_runs_on_two_ranks(monkeypatch, optimizer, base, peak):
    monkeypatch.setattr(training, "EPOCHS", 2)
    errors, losses = training.train(optimizer, 512, base, peak, seeds=[0, 3], warm_up=0.25)
    error, loss = dplab.run(two_epochs, 2, optimizer, 512, base, peak, 3, backend="gloo")[0]
    assert losses[1] == pytest.approx(loss, rel=1e-3)
    assert errors[1] == pytest.approx(error, abs=3e-3)
    assert abs(losses[0] - losses[1]) > 4e-3 * loss  # so one seed is not taken for the other


# Chapter 13's schemes: one process plays all ranks, and here real ones do the same

RATE, STEPS, SEED = 0.05, 20, 1


class Averaged:
    """Changes the gradients, and steps with them."""

    def __init__(self, model, optimizer):
        self.parameters, self.optimizer = list(model.parameters()), optimizer

    def step(self):
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        vector_to_parameters(self.average(gradient), [each.grad for each in self.parameters])
        self.optimizer.step()

    def average(self, gradient):
        average_tensors([gradient])
        return gradient


class Int8(Averaged):
    keeps, residual = False, 0.0

    def average(self, gradient):
        whole = gradient + self.residual
        unit = whole.abs().max() / (127 // dist.get_world_size())
        dist.all_reduce(unit, op=dist.ReduceOp.MAX)
        numbers = (whole / unit).round().to(torch.int8)
        if self.keeps:
            self.residual = whole - numbers * unit
        dist.all_reduce(numbers)
        return numbers * unit / dist.get_world_size()


class Int8Kept(Int8):
    keeps = True


class TopK(Averaged):
    keeps, residual = True, None

    def average(self, gradient):
        if self.residual is None or not self.keeps:
            self.residual = torch.zeros_like(gradient)
        return sparse_average(gradient, self.residual, len(gradient) // 100)


class TopKDropped(TopK):
    keeps = False


PAIRS = {  # as it is played, and on real ranks
    "synchronous": (unsent.Synchronous(), Averaged),
    "int8": (unsent.Int8(keeps=False), Int8),
    "int8, kept": (unsent.Int8(), Int8Kept),
    "top k, kept": (unsent.TopK(), TopK),
    "top k, dropped": (unsent.TopK(keeps=False), TopKDropped),
    "local": (unsent.DiLoCo(every=5, outer=(1.0, 0.0)),
              lambda model, optimizer: LocalSGD(model, optimizer, 5)),
    "DiLoCo": (unsent.DiLoCo(every=5), lambda model, optimizer: DiLoCo(model, optimizer, 5)),
    "streaming": (unsent.Streaming(every=8), lambda model, optimizer: StreamingDiLoCo(
        model, optimizer, every=8, fragments=4, late=4, outer_momentum=0.9)),
}


@pytest.mark.slow
def test_the_played_ranks_compute_what_real_ones_do():
    def on_ranks():
        found = {name: train(DIGITS, real, RATE, SEED, STEPS) for name, (_, real) in PAIRS.items()}
        return found | {"language": train(LANGUAGE, Averaged, 0.003, SEED, 8)}

    found = dplab.run(on_ranks, RANKS, backend="gloo", timeout=120)
    for name, (scheme, _) in PAIRS.items():
        weights = unsent.trained(DIGITS, scheme, RATE, STEPS, [0, SEED])  # 0 must not matter
        model = DIGITS.model(0)
        vector_to_parameters(weights[1, 0], model.parameters())
        for each in (rank[name] for rank in found):
            assert each.loss == pytest.approx(DIGITS.held_out_loss(model), rel=1e-3), name
            assert each.sent == pytest.approx(scheme.sent(weights.shape[-1], STEPS)), name
    [row] = unsent.runs("language", "synchronous", 0.003, 8, [SEED])
    assert found[0]["language"].loss == pytest.approx(row["loss"], rel=1e-3)
    assert found[0]["language"].sent == row["sent"]


@pytest.mark.slow
def test_stale_gradients_are_those_of_a_server_that_takes_turns():
    steps = 3

    def serve():
        model, rank = DIGITS.model(SEED), dist.get_rank()
        if rank == 0:
            optimizer, schedule = DIGITS.optimizer(model.parameters(), RATE, steps * RANKS)
            server = ParameterServer(model, optimizer, schedule.step)
            turns = [1 + number % RANKS for number in range(steps * RANKS)]
            return server.serve(steps * RANKS, turns=turns)

        def compute_loss(number):
            inputs, targets = DIGITS.batch(SEED, number + 1, rank - 1)
            return F.cross_entropy(model(inputs), targets)

        train_as_worker(model, compute_loss)
        return parameters_to_vector(model.parameters()).detach()

    expected = unsent.trained(DIGITS, unsent.SCHEMES["asynchronous"], RATE, steps, [SEED])[0, 0]
    found = dplab.run(serve, 1 + RANKS, backend="gloo")[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_are_one_larger_batch():
    def batch(seed, step, rank):
        parts = (DIGITS.batch(seed, number, rank) for number in (2 * step - 1, 2 * step))
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    torch.testing.assert_close(*(
        unsent.trained(task, unsent.Scheme(ranks=1, batches=batches), RATE, 3, [SEED])
        for task, batches in ((DIGITS, 2), (replace(DIGITS, batch=batch), 1))))


def test_the_searches_are_those_that_the_script_makes(monkeypatch):
    """Each on to the same rates, from the recorded losses; and one loss comes out again."""
    file, found = recorded("unsent"), []
    run = unsent.runs
    monkeypatch.setattr(unsent, "runs", lambda task, scheme, rate: [
        row for row in file["runs"] if (row["task"], row["scheme"], row["rate"]) == (
            task, scheme, rate)])
    for task, schemes in unsent.SEARCHED.items():
        for name in schemes:
            rows = unsent.searched(task, name)
            size = parameters_to_vector(unsent.TASKS[task].model(0).parameters()).numel()
            sent = round(unsent.SCHEMES[name].sent(size, unsent.TASKS[task].steps))
            assert {row["sent"] for row in rows} == {sent}
            found += rows
    assert found == file["runs"] and {row["seed"] for row in found} == {*unsent.SEEDS}
    [row] = [row for row in found if row["task"] == "digits" and (
        row["scheme"], row["seed"], row["rate"]) == ("synchronous", 2, 0.1)]
    assert run("digits", "synchronous", 0.1, None, [2])[0]["loss"] == pytest.approx(
        row["loss"], rel=0.1)

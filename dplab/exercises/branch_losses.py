"""The critical batch at one moment of a run, by branches with larger batches."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


def branch_losses(model, optimizer, batch, factors, samples, train_step, test_loss):
    losses = []
    for k in factors:
        branch, stepper = copy.deepcopy((model, optimizer))
        for group in stepper.param_groups:
            group["lr"] *= math.sqrt(k)
        for indices in samples.split(k * batch):
            train_step(branch, stepper, indices)
        losses.append(test_loss(branch))
    return losses


def with_the_state_loaded(model, optimizer, batch, factors, samples, train_step, test_loss):
    losses = []
    for k in factors:
        branch = copy.deepcopy(model)
        stepper = torch.optim.Adam(branch.parameters())
        stepper.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in stepper.param_groups:
            group["lr"] *= math.sqrt(k)
        for indices in samples.split(k * batch):
            train_step(branch, stepper, indices)
        losses.append(test_loss(branch))
    return losses


BATCH, FACTORS = 3, (1, 2, 4, 8)
COPY = "branch, stepper = copy.deepcopy((model, optimizer))"


class BranchLosses(Calculation):
    number = "7.4"
    title = "Branches with larger batches"
    minutes = 20
    solution = staticmethod(branch_losses)
    also_right = (with_the_state_loaded,)

    def trial(self, attempt):
        return _facts_of(attempt)

    def expected(self, world_size):
        return _facts_of(branch_losses)

    hints = (
        "All branches start at the same point. What makes up that point, beside the weights? And "
        "what must not be changed by a branch?",
        "Each branch has a copy of its own, of model *and* optimizer: `copy.deepcopy` (after "
        "`import copy`) of both in one call, so that the copied optimizer steps the copied model. "
        "Which of Adam's settings follows the batch, and how?",
        "For each k: `branch, stepper = copy.deepcopy((model, optimizer))`, the rates of "
        "`stepper.param_groups` times √k, a `train_step` for each part of `samples.split(k * "
        "batch)`, and then `test_loss(branch)`.",
    )
    slips = (
        # The start.
        Slip("The branches go on from each other, and change the run that they branch from. Each "
             "starts from a copy of its own, optimizer included.",
             {COPY: "branch, stepper = (model, optimizer)"}),
        Slip("The branches go on from each other: one copy, made before the loop, serves them all. "
             "Make a copy for each branch.",
             {"losses = []": "losses = []\nmodel, optimizer = copy.deepcopy((model, optimizer))",
              COPY: "branch, stepper = (model, optimizer)"}),
        Slip("What you test stands where the branches began. Either the copied optimizer steps "
             "another model than the branch (copy both in one call, or make an optimizer for the "
             "branch's parameters and load a deep copy of the state), or you test `model`.",
             {COPY: "branch, stepper = copy.deepcopy(model), copy.deepcopy(optimizer)"},
             {"test_loss(branch)": "test_loss(model)"}),
        Slip("Your branches begin with a new Adam, without its moments. The moment of the run is "
             "the weights *and* the optimizer's state.",
             {COPY: "branch = copy.deepcopy(model)\nstepper = torch.optim.Adam("
                    "branch.parameters(), optimizer.param_groups[0]['lr'])"}),
        Slip("Your branches share Adam's moments with the run: `load_state_dict` takes over the "
             "tensors of the state that it gets, and each step changes them in place. Load a deep "
             "copy for each branch.",
             {"copy.deepcopy(optimizer.state_dict())": "optimizer.state_dict()"},
             {"for k in factors": "state = copy.deepcopy(optimizer.state_dict())\nfor k in factors",
              "copy.deepcopy(optimizer.state_dict()))": "state)"}),
        # The rate.
        Slip("All branches keep the rate of the small batch. A larger batch is judged with the "
             "rate that belongs to it: √k times, for Adam.",
             {'group["lr"] *= math.sqrt(k)': "pass"}),
        Slip("You scale the rate linearly. For Adam it is the square root.", {"math.sqrt(k)": "k"}),
        Slip("Larger batches get smaller rates in your branches: multiply by √k.",
             {"*= math.sqrt(k)": "/= math.sqrt(k)"}),
        # The samples.
        Slip("All branches take the same number of *steps*, so a branch of k times the batch sees "
             "k times the samples, or the smallest one does not see all. Compare at the same "
             "samples.",
             {"samples.split(k * batch):": "samples.split(k * batch)"
              "[: len(samples) // (max(factors) * batch)]:"}),
        Slip("All your branches have the small batch. Branch k takes k times `batch` samples a "
             "step.", {"split(k * batch)": "split(batch)"}),
        Slip("Your branches have batches of k samples. Branch k takes k times `batch`.",
             {"split(k * batch)": "split(k)"}),
        # The result.
        Slip("You return the models. Asked is the loss of each: `test_loss(branch)`.",
             {"test_loss(branch)": "branch"}),
        Slip("You return the loss of one branch. Asked is a list, with one of each.",
             {"return losses": "return losses[-1]"}),
    )


def _facts_of(attempt):
    inputs, targets = seeded("inputs", 96, 5), seeded("targets", 96, 2)

    def train_step(model, optimizer, indices):
        optimizer.zero_grad()
        F.mse_loss(model(inputs[indices]), targets[indices]).backward()
        optimizer.step()

    def test_loss(model):
        with torch.no_grad():
            return F.mse_loss(model(inputs[72:]), targets[72:]).item()

    model = nn.Linear(5, 2)
    with torch.no_grad():
        model.weight.copy_(seeded("weight", 2, 5))
        model.bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for indices in torch.arange(24).split(3):
        train_step(model, optimizer, indices)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = attempt(model, optimizer, BATCH, FACTORS, torch.arange(24, 72), train_step, test_loss)
    found = list(found) if isinstance(found, tuple | list) else found
    facts = {f"how many losses for {len(FACTORS)} branches":
             len(found) if isinstance(found, list) else type(found).__name__}
    for k, loss in zip(FACTORS, found if isinstance(found, list) else [], strict=False):
        facts[f"the loss of branch {k}"] = (
            float(loss) if isinstance(loss, int | float | torch.Tensor) else type(loss).__name__)
    state, moments = before
    facts["that the model is left as it was"] = all(
        torch.equal(value, state[name]) for name, value in model.state_dict().items())
    facts["that the optimizer is left as it was"] = (
        optimizer.param_groups[0]["lr"] == moments["param_groups"][0]["lr"] and all(
            torch.equal(value, moments["state"][number][name])
            for number, each in optimizer.state_dict()["state"].items()
            for name, value in each.items()))
    return facts

"""Chapter 11's drills: the page on which a colleague has planned a run, with a flaw in it.

The plan is FSDP on many H100s: what a GPU holds, how long a step takes, how many days, how much
money. One of the functions that made the page has a fault. The instruments show the page, and what
the planner predicts for the same settings, with the published runs that it is compared with.
"""

import random
from dataclasses import dataclass, replace

from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import Option, option_of
from dplab.predict.cluster import Cluster
from dplab.predict.reached import Range, reached
from dplab.predict.rent import Rent

NEAR = 1e-3  # relative: far above rounding, far below what a fault changes
SEEN = 1.03  # times: what a colleague notices
DAY = 86_400
# Links, sequences of a micro-batch, their tokens: recomputing and waiting both take their time, and
# without recomputing no GPU of 80 GB would hold it, or the recomputing were a flaw itself.
LAYOUTS = (("100 Gb/s", 3, 4096), ("100 Gb/s", 6, 2048), ("100 Gb/s", 7, 2048))


@dataclass(frozen=True)
class Recipe:
    """What is to be trained, and where: ``sequences`` is the most that a step may have."""

    model: str
    gpus: int
    network: str
    sequence: int
    micro: int
    sequences: int
    tokens: float
    price: float


# The parts


def micro_batches(recipe):
    return recipe.sequences // (recipe.gpus * recipe.micro)


def held(option):
    return option.budget.total


def seconds_of_a_step(option):
    return option.seconds


def share_of_the_prediction(like, lasting):
    return like.middle * lasting


def money(recipe, days):
    return 24 * days * recipe.gpus * recipe.price


@dataclass(frozen=True)
class Page:
    """What the colleague hands over. ``held`` in bytes, ``seconds`` of a step as predicted."""

    sequences: int
    held: float
    seconds: float
    days: float
    money: float


@dataclass(frozen=True)
class Readings:
    """The page, and what the planner says of the same recipe."""

    recipe: Recipe
    page: Page
    right: Page
    option: Option
    like: Range
    lasting: float

    @property
    def one(self) -> Option:
        """The same with one micro-batch in a step."""
        return replace(self.option, job=replace(self.option.job, accumulation=1))

    @property
    def share(self) -> float:
        """Of the page's own seconds, what its days ask for."""
        steps = self.recipe.tokens / (self.page.sequences * self.recipe.sequence)
        return steps * self.page.seconds / (self.page.days * DAY)


def plan(recipe: Recipe, **parts) -> Readings:
    """The page as these parts make it, where others are not given the healthy ones."""
    cluster = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS[recipe.network]).of(recipe.gpus)

    def option_with(accumulation):
        return option_of("FSDP", MODELS[recipe.model], cluster, batch=recipe.micro,
                         accumulation=accumulation, sequence=recipe.sequence, recompute="full")

    right = option_with(micro_batches(recipe))
    like = reached("H100", recipe.gpus)
    assert like is not None
    lasting = Rent(recipe.tokens, 1, recipe.gpus, 12 * right.job.model.parameters).goodput

    def page(micro_batches=micro_batches, held=held, seconds_of_a_step=seconds_of_a_step,
             share_of_the_prediction=share_of_the_prediction, money=money):
        option = option_with(micro_batches(recipe))
        seconds = seconds_of_a_step(option)
        steps = recipe.tokens / (option.global_batch * recipe.sequence)
        days = steps * seconds / share_of_the_prediction(like, lasting) / DAY
        return Page(option.global_batch, held(option), seconds, days, money(recipe, days))

    return Readings(recipe, page(**parts), page(), right, like, lasting)


# Suspects


def near(one, other):
    return abs(one / other - 1) < NEAR


def in_each_micro_batch(readings):
    one, times = readings.one, readings.option.job.accumulation
    once = one.seconds + (times - 1) * one.compute_seconds
    return near(readings.page.seconds, once), (
        f"The page has {readings.page.seconds:.2f} s. With {times} micro-batches, all of which "
        f"wait for what they send, it is {readings.right.seconds:.2f} s, and {once:.2f} s if only "
        "one waited.")


def twice_forward(readings):
    kept = readings.option.recomputing("none").seconds
    return near(readings.page.seconds, kept), (
        f"The page has {readings.page.seconds:.2f} s. With blocks computed twice it is "
        f"{readings.right.seconds:.2f} s, and {kept:.2f} s with all activations kept.")


def by_the_peak(readings):
    job, gpu = readings.option.job, readings.option.cluster.gpu
    least = job.model_flops / gpu.bf16_flops
    return near(readings.page.seconds, least), (
        f"The page has {readings.page.seconds:.2f} s. A step's model FLOPs at "
        f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s take {least:.2f} s, and the step "
        f"{readings.right.seconds:.2f} s.")


def between_steps(readings):
    states = readings.option.budget.states.total
    return near(readings.page.held, states), (
        f"The page has {in_gb(readings.page.held)}. A GPU holds {in_gb(readings.right.held)} at "
        f"its fullest, and {in_gb(states)} of states all the time.")


def in_gib(readings):
    return near(readings.page.held * 2**30 / 1e9, readings.right.held), (
        f"The page has {in_gb(readings.page.held)}, the planner {in_gb(readings.right.held)}: "
        f"{readings.right.held / readings.page.held:.3f} times as much. 2³⁰ bytes are "
        f"{2**30 / 1e9:.3f} × 10⁹.")


def too_many_sequences(readings):
    return readings.page.sequences > readings.recipe.sequences, (
        f"The page's step has {readings.page.sequences:,} sequences. The recipe allows "
        f"{readings.recipe.sequences:,}.")


def as_kernels_allow(readings):
    return near(readings.share, 1), (
        f"The page's days ask for {readings.share:.2f} of what its own seconds predict. The middle "
        f"of runs like it, failures and saves included, is "
        f"{share_of_the_prediction(readings.like, readings.lasting):.2f}.")


def by_the_node(readings):
    page, recipe = readings.page, readings.recipe
    paid = page.money / (24 * page.days * recipe.price)
    return near(paid, recipe.gpus / 8), (
        f"The page pays ${recipe.price:g} an hour for {paid:g}. There are {recipe.gpus} GPUs, in "
        f"{recipe.gpus // 8} nodes.")


def in_gb(size):
    return f"{size / 1e9:.1f} GB"


SUSPECTS = (
    Suspect("stingy accumulation",
            "Each micro-batch waits for what it sends; the plan lets one wait.", "timeline",
            in_each_micro_batch),
    Suspect("forgotten recomputing",
            "Blocks are computed twice, and the plan's time has them once.", "timeline",
            twice_forward),
    Suspect("data-sheet speed", "The plan divides FLOPs by the GPU's peak.", "timeline",
            by_the_peak),
    Suspect("resting footprint", "The plan has what a GPU holds between steps, not at its fullest.",
            "memory", between_steps),
    Suspect("binary gigabytes", "The plan's bytes are divided by 2³⁰, and called GB.", "memory",
            in_gib),
    Suspect("overfull batch", "A step has more sequences than the recipe allows.", "layout",
            too_many_sequences),
    Suspect("unbroken optimism", "The plan takes all that kernels allow, and no run reaches that.",
            "runs", as_kernels_allow),
    Suspect("bargain price", "The plan takes the cost of a GPU for that of a node.", "layout",
            by_the_node),
)

# Nothing has run yet, so the letter tells nothing of the flaw: the page has to.
ASKED = ("We sign for {n} GPUs on Friday. Please check the page first.",
         "My page for {n} GPUs is done, and everybody likes it. Would you look it over?",
         "Before I ask for {n} GPUs: do you believe these numbers?",
         "The last run did not go as my page said. This page is for {n} GPUs. What is wrong now?")


def of_plan(edits, symptoms):
    return (Fault(edits, ASKED[0], symptoms, world_sizes=(64, 128), also=ASKED[1:]),)


CASES = (
    Case("a", "stingy accumulation", seconds_of_a_step, of_plan(
        {"return option.seconds":
         "one = replace(option, job=replace(option.job, accumulation=1))\n"
         "return one.seconds + (option.job.accumulation - 1) * one.compute_seconds"}, {"late"})),
    Case("b", "forgotten recomputing", seconds_of_a_step, of_plan(
        {"return option.seconds": 'return option.recomputing("none").seconds'}, {"late"})),
    Case("c", "data-sheet speed", seconds_of_a_step, of_plan(
        {"return option.seconds":
         "return option.job.model_flops / option.cluster.gpu.bf16_flops"}, {"late"})),
    Case("d", "resting footprint", held, of_plan(
        {"option.budget.total": "option.budget.states.total"}, {"holds more", "in time"})),
    Case("e", "binary gigabytes", held, of_plan(
        {"option.budget.total": "option.budget.total / 2**30 * 1e9"}, {"holds more", "in time"})),
    Case("f", "overfull batch", micro_batches, of_plan(
        {"recipe.sequences // (recipe.gpus * recipe.micro)":
         "-(-recipe.sequences // (recipe.gpus * recipe.micro))"}, {"other steps", "in time"})),
    Case("g", "unbroken optimism", share_of_the_prediction, of_plan(
        {"like.middle * lasting": "1.0"}, {"late"})),
    Case("h", "bargain price", money, of_plan(
        {"recipe.gpus *": "(recipe.gpus // 8) *"}, {"dearer", "in time"})),
)


class FlawedPlan(SickJob):
    """A run as a colleague has planned it."""

    chapter = 11
    running = "Asking the planner …"
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Recipe:
        network, micro, sequence = chances.choice(LAYOUTS)
        whole, times = self._world_size * micro, chances.randrange(4, 9)
        return Recipe("Llama-3 8B", self._world_size, network, sequence, micro,
                      times * whole + whole // 2, chances.choice((2e11, 5e11, 1e12)),
                      chances.choice((1.5, 2.0, 2.5)))

    def _description(self):
        recipe = self._settings
        return (f"The plan: {recipe.model} on {recipe.gpus} H100s with FSDP, in nodes of 8 with a "
                f"link of {recipe.network} for each GPU; {recipe.tokens:.0e} tokens, at most "
                f"{recipe.sequences:,} sequences of {recipe.sequence:,} tokens in a step.")

    def _run(self, part):
        return plan(self._settings, **{self._part_name: part})

    @instrument
    def page(self) -> None:
        """What the plan says: memory, seconds of a step, days, money."""
        page = self._readings.page
        print(f"A GPU holds {in_gb(page.held)} at most.\n"
              f"A step has {page.sequences:,} sequences, and is predicted to take "
              f"{page.seconds:.2f} s.\n"
              "In the middle of what runs like it reach, with time for failures and saves, "
              f"the run takes {page.days:.1f} days and costs ${page.money:,.0f}.")

    @instrument
    def layout(self) -> None:
        """The recipe: GPUs, nodes, micro-batches, and what an hour costs."""
        recipe = self._readings.recipe
        print(f"node 0 has rank 0, rank 1 and so on to rank 7; there are {recipe.gpus // 8} nodes")
        print(f"in each micro-batch a GPU has {recipe.micro} × {recipe.sequence:,} tokens")
        print(f"at most {recipe.sequences:,} sequences in a step of all GPUs")
        print(f"a GPU costs ${recipe.price:g} an hour")

    @instrument
    def memory(self) -> None:
        """What the planner says that a GPU holds at its fullest, by parts."""
        budget = self._readings.option.budget
        print_table(["10⁹ bytes", *budget.parts], ["", *(
            f"{size / 1e9:.1f}" for size in budget.parts.values())])
        print(f"in all {in_gb(budget.total)}, at: {budget.moment}; blocks are computed twice")

    @instrument
    def timeline(self) -> None:
        """What the planner says of a step: computing, and waiting for what is sent."""
        readings = self._readings
        option, one = readings.option, readings.one
        update = option.spans[-1].seconds
        kept = one.recomputing("none")
        print(f"{option.job.accumulation} micro-batches, one after the other. In each:")
        print(f"  computing {one.compute_seconds - update:.3f} s, of it the blocks' second forward "
              f"{one.compute_seconds - kept.compute_seconds:.3f} s")
        print(f"  waiting for what is sent {one.exposed_seconds:.3f} s "
              f"({kept.exposed_seconds:.3f} s without a second forward)")
        print(f"then the optimizer {update:.3f} s")
        print(f"FLOPs of the model in it, on one GPU: {option.job.model_flops / 1e12:,.0f} T; the "
              f"GPU's peak is {option.cluster.gpu.bf16_flops / 1e12:.0f} TFLOP/s")

    @instrument
    def runs(self) -> None:
        """The range of what published runs like it reached of what is predicted for them."""
        readings = self._readings
        print(f"the range made from {readings.like.runs} published runs like it: "
              f"{readings.like.low:.2f} to {readings.like.high:.2f} of what is predicted, "
              f"{readings.like.middle:.2f} in the middle\n"
              f"failures and saves leave {readings.lasting:.3f} of the time")
        print(f"the whole run has {readings.recipe.tokens:,.0f} tokens")

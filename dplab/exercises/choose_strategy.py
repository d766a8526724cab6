"""Exercise 10.1: the first strategy that fits."""

import operator

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases

# Parameters, ranks, memory, K, activations, gathered: each answer, cases near a limit, and last
# two that need exactly the memory that there is.
CASES = ((1.2e9, 8, 80e9, 12, 10e9, 1e9), (1.5e9, 1, 40e9, 12, 10e9, 1e9),
         (7e9, 8, 80e9, 12, 20e9, 2e9), (8e9, 8, 80e9, 8, 5e9, 2e9), (3e9, 2, 60e9, 16, 1e9, 9e9),
         (13e9, 16, 80e9, 12, 20e9, 3e9), (13e9, 16, 48e9, 12, 12e9, 3e9),
         (6.7e9, 4, 40e9, 12, 6e9, 3e9), (70e9, 64, 80e9, 12, 15e9, 7e9),
         (70e9, 8, 80e9, 12, 10e9, 7e9), (7e9, 8, 40e9, 8, 25e9, 1e9),
         (405e9, 512, 80e9, 16, 50e9, 20e9), (1e9, 4, 20e9, 12, 4e9, 1e9),
         (4e9, 4, 32e9, 12, 14e9, 2e9))

STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")


def choose_strategy(parameters, ranks, memory, K, activations, gathered):
    weights, gradients, optimizer = 2 * parameters, 2 * parameters, K * parameters
    states = {"DDP": weights + gradients + optimizer,
              "ZeRO-1": weights + gradients + optimizer / ranks,
              "ZeRO-2": weights + (gradients + optimizer) / ranks,
              "FSDP": (weights + gradients + optimizer) / ranks + gathered}
    for strategy, held in states.items():
        if held + activations <= memory:
            return strategy, held + activations
    return None


def _choice(first=(3, 2, 1), *, order=range(4), sizes=(2, 2), K=lambda K: K,
            share=operator.truediv, activations=lambda size, ranks, stage: size,
            judged=lambda states, need: need,
            gathered=lambda size, ranks, stage: size * (stage == 3),
            memory=lambda size, ranks: size, fits=operator.le, least=False, nothing=None):
    """A choice with one thing wrong; ``first``: the strategy from which on each part is sharded."""

    def attempt(parameters, ranks, has, optimizer, saved, whole):
        needs, compared = {}, {}
        for stage in order:
            sizes_held = [share(size, ranks) if stage >= begin else size
                          for begin, size in zip(first, (*sizes, K(optimizer)), strict=True)]
            name, states = STRATEGIES[stage], parameters * sum(sizes_held)
            needs[name] = (states + gathered(whole, ranks, stage)
                           + activations(saved, ranks, stage))
            compared[name] = judged(states, needs[name])
        fitting = [(name, need) for name, need in needs.items()
                   if fits(compared[name], memory(has, ranks))]
        if not fitting:
            return nothing and (nothing, needs[nothing])
        return min(fitting, key=operator.itemgetter(1)) if least else fitting[0]

    return attempt


def _what_is_left(parameters, ranks, memory, *rest):
    found = choose_strategy(parameters, ranks, memory, *rest)
    return found and (found[0], memory - found[1])

_LEAST = ("You return the strategy that needs the least memory. Memory that is left over is worth "
          "nothing; communication and machinery cost: take the first that fits, DDP before all.")

_FIXED_K = ("You took a number for K. With an fp32 master copy it is 12, without one 8, with fp32 "
            "gradients in the optimizer 16: use the argument.")


class ChooseStrategy(Calculation):
    number = "10.1"
    title = "The first strategy that fits"
    minutes = 15
    hints = (
        "Write down the bytes of one rank for all four strategies first, and compare afterwards: "
        "2 + 2 + K bytes for each parameter, and each strategy divides one more summand by the "
        "ranks than the one before it.",
        "To all four come this rank's activations, undivided: they belong to its own samples. To "
        "FSDP alone comes what it has gathered.",
        "Go through the four in their order and return the first that fits. After the loop: None.",
    )
    solution = staticmethod(choose_strategy)
    mistakes = (
        Mistake(_choice(order=(3, 2, 1, 0)), _LEAST),
        Mistake(_choice(least=True), _LEAST),
        Mistake(_choice(order=(0, 3)), "Where DDP does not fit you go to FSDP at once. In between, "
                "ZeRO-1 and ZeRO-2 keep the parameters whole, so that nothing is gathered in "
                "forward and backward."),
        Mistake(_choice(order=(0, 2, 3)), "You pass over ZeRO-1. Where it fits, the gradients "
                "need not be sharded as well."),
        Mistake(_choice(fits=operator.lt), "A strategy that needs exactly `memory` fits: these "
                "bytes may be used. Compare with `<=`."),
        Mistake(_choice(nothing="FSDP"), "Where nothing fits you return FSDP all the same. Return "
                "None: this needs more ranks, fewer activations, or another kind of parallelism."),
        Mistake(_choice((3, 1, 1)), "Your ZeRO-1 shards the gradients, too: that is ZeRO-2."),
        Mistake(_choice((2, 2, 1)), "Your ZeRO-2 shards the parameters, too. On each rank they "
                "stay whole until stage 3, which is FSDP."),
        Mistake(_choice((3, 3, 1)), "Your ZeRO-2 has whole gradients. It shards them, besides the "
                "optimizer state."),
        Mistake(_choice((4, 2, 1)), "Your FSDP has whole parameters. It shards them, too; what is "
                "whole for a moment is `gathered`."),
        Mistake(_choice((0, 0, 0)), "You divide the states by the ranks in every strategy. DDP "
                "holds all of them on each rank."),
        Mistake(_choice(K=lambda K: 8), _FIXED_K),
        Mistake(_choice(K=lambda K: 12), _FIXED_K),
        Mistake(_choice(K=lambda K: K - 4), "You took K for all the bytes of a parameter. It is "
                "the optimizer's part: the parameter and its gradient have 2 more each."),
        Mistake(_choice(sizes=(2, 0)), "You left out the gradients: 2 bytes for each parameter."),
        Mistake(_choice(sizes=(4, 4)), "You took 4 bytes for parameters and gradients. In mixed "
                "precision they have 2 each; what is kept in fp32 is in K."),
        Mistake(_choice(share=operator.floordiv), "You divide bytes per parameter by the ranks "
                "with `//`, which rounds down: 12 // 8 is 1, and a share is 1.5."),
        Mistake(_choice(judged=lambda states, need: states), "You compare the states alone with "
                "the memory, and add activations and `gathered` to the answer afterwards. All of "
                "it has to fit: add first, compare then."),
        *(Mistake(_choice(activations=lambda *_: 0, gathered=gathered), "You forgot the "
                  "activations: the states have to fit into what these leave.") for gathered in (
            lambda size, ranks, stage: size * (stage == 3), lambda *_: 0)),
        Mistake(_choice(activations=lambda size, ranks, stage: size / ranks ** (stage == 3)),
                "You divide FSDP's activations by the ranks. It shards all of the states, and no "
                "activations: those belong to each rank's own samples."),
        Mistake(_choice(activations=lambda size, ranks, stage: size / ranks),
                "You divide the activations by the ranks. They are those of this rank's own "
                "samples, and no stage shards them."),
        Mistake(_choice(activations=lambda size, ranks, stage: size * ranks), "You multiply the "
                "activations by the ranks. They are bytes of one rank, as is the memory."),
        Mistake(_choice(gathered=lambda *_: 0), "You forgot `gathered`. FSDP holds more "
                "than its shards: the units in use are whole."),
        Mistake(_choice(gathered=lambda size, ranks, stage: size / ranks * (stage == 3)), "You "
                "divide `gathered` by the ranks. The units in use are whole on each rank, whatever "
                "the number of ranks."),
        Mistake(_choice(gathered=lambda size, ranks, stage: size), "You add `gathered` to every "
                "strategy. Only FSDP gathers parameters."),
        Mistake(_choice(memory=lambda size, ranks: size * 2**30 / 1e9), "You mix decimal and "
                "binary units: needs divided by 2³⁰ against a memory divided by 10⁹. All are bytes "
                "here, so divide nothing."),
        Mistake(_what_is_left, "You return what is left of the memory. Asked is what a rank "
                "holds."),
        Mistake(_choice(memory=lambda size, ranks: size * ranks), "You compare what one rank needs "
                "with the memory of all of them. Each rank has `memory` bytes for itself."),
    )

    def trial(self, attempt):
        return of_cases(_of_choice, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_of_choice, CASES, choose_strategy)


def _of_choice(case, found):
    parameters, ranks, memory, K, activations, gathered = case
    of = (f"for {parameters / 1e9:g}e9 parameters on {ranks} ranks of {memory / 1e9:g}e9 bytes, "
          f"K = {K}, activations {activations / 1e9:g}e9, gathered {gathered / 1e9:g}e9")
    name, need = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
    return {f"the strategy {of}": name, f"the bytes of a rank {of}": need}

"""The strategy that shards least of those that fit, from the bytes of one rank."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


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


def sharding_one_part_more_each_time(parameters, ranks, memory, K, activations, gathered):
    weights, gradients, optimizer, rest = 2, 2, K, activations  # the first three per parameter
    for strategy in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP"):
        if strategy == "ZeRO-1":
            optimizer = K / ranks
        elif strategy == "ZeRO-2":
            gradients = 2 / ranks
        elif strategy == "FSDP":
            weights = 2 / ranks
            rest = activations + gathered
        held = parameters * (weights + gradients + optimizer) + rest
        if held <= memory:
            return strategy, held
    return None


# Parameters, ranks, memory, K, activations, gathered: each answer, cases near a limit, and last
# two that need exactly the memory that there is.
CASES = ((1.2e9, 8, 80e9, 12, 10e9, 1e9), (1.5e9, 1, 40e9, 12, 10e9, 1e9),
         (7e9, 8, 80e9, 12, 20e9, 2e9), (8e9, 8, 80e9, 8, 5e9, 2e9), (3e9, 2, 60e9, 16, 1e9, 9e9),
         (13e9, 16, 80e9, 12, 20e9, 3e9), (13e9, 16, 48e9, 12, 12e9, 3e9),
         (6.7e9, 4, 40e9, 12, 6e9, 3e9), (70e9, 64, 80e9, 12, 15e9, 7e9),
         (70e9, 8, 80e9, 12, 10e9, 7e9), (7e9, 8, 40e9, 8, 25e9, 1e9),
         (405e9, 512, 80e9, 16, 50e9, 20e9), (1e9, 4, 20e9, 12, 4e9, 1e9),
         (4e9, 4, 32e9, 12, 14e9, 2e9))


class ChooseStrategy(Calculation):
    number = "11.1"
    title = "The first strategy that fits"
    minutes = 15
    solution = staticmethod(choose_strategy)
    also_right = (sharding_one_part_more_each_time,)

    def trial(self, attempt):
        return of_cases(of_choice, CASES, attempt)

    def expected(self, world_size):
        return of_cases(of_choice, CASES, choose_strategy)

    hints = (
        "Write down the bytes of one rank for all four strategies first, and compare afterwards: "
        "2 + 2 + K bytes for each parameter, and each strategy divides one more summand by the "
        "ranks than the one before it.",
        "To all four come this rank's activations, undivided: they belong to its own samples. To "
        "FSDP alone comes what it has gathered.",
        "Go through the four in their order and return the first that fits. After the loop: None.",
    )
    slips = (
        # Which one is taken.
        Slip("You return the strategy that needs the least memory. Memory that is left over is "
             "worth nothing; communication and machinery cost: take the first that fits, DDP "
             "before all.",
             {"in states.items()": "in reversed(states.items())"},
             {"in states.items()": "in sorted(states.items(), key=lambda each: each[1])"}),
        Slip("You go through the strategies in the order of what they hold. Where `gathered` is "
             "more than sharding saves, as on one rank, FSDP holds most. Go from DDP to FSDP.",
             {"in states.items()": "in sorted(states.items(), key=lambda each: -each[1])"}),
        Slip("Where DDP does not fit you go to FSDP at once. In between, ZeRO-1 and ZeRO-2 keep "
             "the parameters whole, so that nothing is gathered in forward and backward.",
             {"for strategy, held": 'del states["ZeRO-1"], states["ZeRO-2"]\nfor strategy, held'}),
        Slip("You pass over ZeRO-1. Where it fits, the gradients need not be sharded as well.",
             {"for strategy, held": 'del states["ZeRO-1"]\nfor strategy, held'}),
        Slip("A strategy that needs exactly `memory` fits: these bytes may be used. Compare with "
             "`<=`.", {"<= memory": "< memory"}),
        Slip("Where nothing fits you return FSDP all the same. Return None: this needs more ranks, "
             "fewer activations, or another kind of parallelism.",
             {"return None": "return strategy, held"},
             {"return None": "return strategy, held + activations"}),
        Slip("You return the bytes without the activations. A rank holds these, too.",
             {"return strategy, held + activations": "return strategy, held"}),
        # What each strategy shards.
        Slip("Your DDP divides the states by the ranks. It holds all of them on each rank.",
             {'"DDP": weights + gradients + optimizer':
              '"DDP": (weights + gradients + optimizer) / ranks'}),
        Slip("Your ZeRO-1 shards the gradients, too: that is ZeRO-2.",
             {"gradients + optimizer / ranks": "(gradients + optimizer) / ranks"}),
        Slip("Your ZeRO-2 shards the parameters, too. On each rank they stay whole until stage 3, "
             "which is FSDP.",
             {"weights + (gradients + optimizer)": "(weights + gradients + optimizer)"}),
        Slip("Your ZeRO-2 has whole gradients. It shards them, besides the optimizer state.",
             {"(gradients + optimizer) / ranks": "gradients + optimizer / ranks"}),
        Slip("Your FSDP has whole parameters. It shards them, too; what is whole for a moment is "
             "`gathered`.",
             {"(weights + gradients + optimizer)": "weights + (gradients + optimizer)"}),
        # Bytes of a parameter.
        Slip("You took a number for K. With an fp32 master copy it is 12, without one 8, with fp32 "
             "gradients in the optimizer 16: use the argument.",
             {"K * parameters": "8 * parameters"}, {"K * parameters": "12 * parameters"}),
        Slip("You took K for all the bytes of a parameter. It is the optimizer's part: the "
             "parameter and its gradient have 2 more each.",
             {"K * parameters": "(K - 4) * parameters"}),
        Slip("You left out the gradients: 2 bytes for each parameter.",
             {"2 * parameters, K": "0, K"}),
        Slip("You took 4 bytes for parameters and gradients. In mixed precision they have 2 each; "
             "what is kept in fp32 is in K.", {"2 * parameters": "4 * parameters"}),
        Slip("You divide bytes per parameter by the ranks with `//`, which rounds down: 12 // 8 is "
             "1, and a share is 1.5.", {"K / ranks": "K // ranks", "2 / ranks": "2 // ranks"}),
        # Activations, and what FSDP gathers.
        Slip("You compare the states alone with the memory, and add activations and `gathered` to "
             "the answer afterwards. All of it has to fit: add first, compare then.",
             {"if held <=": "if held - rest <="}),
        Slip("You forgot the activations: the states have to fit into what these leave.",
             {"held + activations": "held"}),
        Slip("You divide FSDP's activations by the ranks. It shards all of the states, and no "
             "activations: those belong to each rank's own samples.",
             {"rest = activations + gathered": "rest = activations / ranks + gathered"}),
        Slip("You divide the activations by the ranks. They are those of this rank's own samples, "
             "and no stage shards them.", {"held + activations": "held + activations / ranks"}),
        Slip("You multiply the activations by the ranks. They are bytes of one rank, as is the "
             "memory.", {"held + activations": "held + activations * ranks"}),
        Slip("You forgot `gathered`. FSDP holds more than its shards: the units in use are whole.",
             {" + gathered": ""}),
        Slip("You divide `gathered` by the ranks. The units in use are whole on each rank, "
             "whatever the number of ranks.", {"+ gathered": "+ gathered / ranks"}),
        Slip("You add `gathered` to every strategy. Only FSDP gathers parameters.",
             {", K, activations  #": ", K, activations + gathered  #"}),
        # The memory.
        Slip("You mix decimal and binary units: needs divided by 2³⁰ against a memory divided by "
             "10⁹. All are bytes here, so divide nothing.",
             {"<= memory": "<= memory * 2**30 / 1e9"}),
        Slip("You return what is left of the memory. Asked is what a rank holds.",
             {"return strategy, held + activations":
              "return strategy, memory - held - activations"}),
        Slip("You compare what one rank needs with the memory of all of them. Each rank has "
             "`memory` bytes for itself.", {"<= memory": "<= memory * ranks"}),
    )


def of_choice(case, found):
    parameters, ranks, memory, K, activations, gathered = case
    of = (f"for {parameters / 1e9:g}e9 parameters on {ranks} ranks of {memory / 1e9:g}e9 bytes, "
          f"K = {K}, activations {activations / 1e9:g}e9, gathered {gathered / 1e9:g}e9")
    name, need = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
    return {f"the strategy {of}": name, f"the bytes of a rank {of}": need}

"""What of a recipe follows the global batch, when it moves to other GPUs."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def scaled_recipe(optimizer, batch, rate, decay, warm_up, steps, ranks, local_batch,
                  micro_batches):
    global_batch = ranks * micro_batches * local_batch
    k = global_batch / batch
    factor = k if optimizer == "SGD" else math.sqrt(k)
    warm_up_samples, samples = warm_up * batch, steps * batch
    return (rate * factor, decay * k / factor, math.ceil(warm_up_samples / global_batch),
            math.ceil(samples / global_batch))


CASES = (
    ("SGD", 256, 0.1, 0.0002, 500, 9_000, 16, 32, 3),
    ("AdamW", 64, 0.0003, 0.1, 2_000, 70_001, 12, 8, 4),
    ("SGD", 512, 0.4, 0.0001, 300, 5_000, 64, 4, 2),  # the same global batch: nothing changes
    ("AdamW", 1024, 0.002, 0.05, 750, 11_000, 3, 16, 5),  # a smaller one
    ("AdamW", 96, 0.001, 0.1, 121, 4_003, 7, 40, 1),
)
K = "k = global_batch / batch"
WARM_UP, ALL = "warm_up_samples / global_batch", "(samples / global_batch)"
FACTOR = 'k if optimizer == "SGD" else math.sqrt(k)'


class ScaledRecipe(Calculation):
    number = "7.1"
    title = "The recipe on other GPUs"
    minutes = 10
    solution = staticmethod(scaled_recipe)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, scaled_recipe)

    hints = (
        "How many samples go into one step of the new layout, from all ranks together?",
        "The rate follows the global batch, by the rule of the optimizer. The weights forget in "
        "about 1/(ηλ) steps, which are B/(ηλ) samples: the decay is what keeps these. Warm-up "
        "and the whole run keep their numbers of *samples*.",
        "With k = new global batch / old one: rate · k and the same decay for SGD, rate · √k and "
        "decay · √k for AdamW; the samples `warm_up * batch` and `steps * batch`, divided by the "
        "new global batch, rounded up.",
    )
    slips = (
        # The global batch.
        Slip("Your global batch leaves out the micro-batches. Their gradients are added up before "
             "a step, so their samples belong to that step's batch.",
             {"ranks * micro_batches * local_batch": "ranks * local_batch"}),
        Slip("Your global batch leaves out the ranks: each of them brings its own samples to a "
             "step.", {"ranks * micro_batches * local_batch": "micro_batches * local_batch"}),
        Slip("You scale the rate by the number of ranks. The recipe knows nothing of ranks: only "
             "the samples of a step, new and old, count.", {K: f"{K}\nk = ranks"}),
        Slip("In your answer the batch grows by the number of ranks, in the rate and in the steps. "
             "The factor is the samples of a new step divided by those of an old one.",
             {"ranks * micro_batches * local_batch": "ranks * batch"},
             *({K: "k = ranks", WARM_UP: warm_up, ALL: steps} for warm_up, steps in (
                 ("warm_up / k", "(steps / k)"), ("warm_up", "(steps / k)")))),
        Slip("In your answer the batch grows by ranks × micro-batches. That is right only if a "
             "micro-batch is as large as the recipe's batch. The factor is the samples of a new "
             "step divided by those of an old one.",
             {"ranks * micro_batches * local_batch": "ranks * micro_batches * batch"},
             {K: "k = ranks * micro_batches"},
             *({K: "k = ranks * micro_batches", WARM_UP: warm_up, ALL: steps}
               for warm_up, steps in (("warm_up / k", "(steps / k)"), ("warm_up", "(steps / k)")))),
        Slip("You turned the factor around: with more samples in a step the rate grows.",
             {K: "k = batch / global_batch"}),
        # The rules.
        Slip("Adam's rate, and AdamW's, follows the square root of the batch.", {FACTOR: "k"}),
        Slip("SGD's rate follows the batch itself, not its square root.", {FACTOR: "math.sqrt(k)"}),
        Slip("You exchanged the rules: linear for SGD, the square root for AdamW.",
             {'"SGD"': '"AdamW"'}),
        Slip("The rate stays as it was. A larger batch needs a larger rate, or its fewer steps do "
             "not get as far.", {"rate * factor": "rate"}),
        # The decay.
        Slip("Your decay stays. AdamW's rate grows by √k alone, so λ has the other √k, to keep the "
             "samples in which the weights forget, B/(ηλ).", {"decay * k / factor": "decay"}),
        Slip("Your decay follows the batch as if the rate stayed. Rate times decay has to grow "
             "k-fold, and the rate has grown already.", {"decay * k / factor": "decay * k"}),
        Slip("For AdamW your decay is right. But SGD's rate has all of k already, so its decay "
             "stays.", {"decay * k / factor": "decay * factor"},
             {"decay * k / factor": "decay * math.sqrt(k)"}),
        Slip("Your decay makes up for the rate, so that rate times decay stays. What has to stay "
             "are the samples in which the weights forget, B/(ηλ), and B has grown.",
             {"decay * k / factor": "decay / factor"}),
        # The steps.
        Slip("Warm-up keeps its number of steps, and so it takes k times the samples. Keep the "
             "samples.", {WARM_UP: "warm_up"}),
        Slip("The run keeps its number of steps, and so it takes k times the samples. Keep the "
             "samples.", {ALL: "(steps)"}),
        Slip("Both keep their steps, so the run takes k times the samples. Keep the samples.",
             {WARM_UP: "warm_up", ALL: "(steps)"}),
        Slip("You return samples. Asked are steps: divide by the samples of a step.",
             {WARM_UP: "warm_up_samples",
              ALL: "(samples)"}),
        Slip("You round down, so some samples of the old run are left out. Round up.",
             {"math.ceil": "math.floor"}),
        Slip("You round to the nearest number. Where that is the lower one, some samples of the "
             "old run are left out. Round up.", {"math.ceil": "round"}),
        Slip("The steps are not whole: round up.", {"math.ceil": "float"}),
    )


def _facts_of(case, answer):
    optimizer, batch, rate, decay, warm_up, steps, ranks, local_batch, micro_batches = case
    where = (f"from {optimizer}, batch {batch}, rate {rate:g}, decay {decay:g}, {warm_up} and "
             f"{steps} steps to {ranks} ranks × {micro_batches} × {local_batch}")
    four = isinstance(answer, tuple | list) and len(answer) == 4
    rate, decay, warm_up, steps = answer if four else (answer, None, None, None)
    return {f"the rate {where}": float(rate) if isinstance(rate, int) else rate,
            f"the decay {where}": float(decay) if isinstance(decay, int) else decay,
            f"the steps of warm-up {where}": warm_up, f"the steps {where}": steps}

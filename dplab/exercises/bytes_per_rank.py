"""What each stage of ZeRO leaves on a rank: bytes of parameters, gradients and optimizer state."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip


def bytes_per_rank(stage, parameters, ranks, each):
    parameter, gradient, state = each
    optimizer = state / ranks if stage >= 1 else state
    gradients = gradient / ranks if stage >= 2 else gradient
    weights = parameter / ranks if stage >= 3 else parameter
    return parameters * (weights + gradients + optimizer)


STAGES = range(4)
# Parameters, ranks, and the bytes of each: more cases of a stage than there are terms in a sum.
SIZES = ((70_000_000_000, 8, (2, 2, 8)), (7_500_000_000, 64, (2, 2, 12)),
         (1_000_003, 3, (4, 4, 8)), (124_439_808, 1, (2, 4, 12)), (405_000_000_000, 512, (1, 2, 6)),
         (1_300_000_000, 16, (4, 2, 4)))


class BytesPerRank(Calculation):
    number = "8.1"
    title = "The memory of a stage, on paper"
    minutes = 10
    solution = staticmethod(bytes_per_rank)

    def trial(self, attempt):
        answers = {_of_case(stage, *size): attempt(stage, *size)
                   for size in SIZES for stage in STAGES}
        return {fact: float(answer) if isinstance(answer, int) else answer
                for fact, answer in answers.items()}

    def expected(self, world_size):
        return self.trial(bytes_per_rank)

    def terms(self):
        return {f"stage {stage}": {_of_case(stage, *size): _terms(*size) for size in SIZES}
                for stage in STAGES}

    hints = (
        "Three summands: parameters, gradients, optimizer state. Write them down for stage 0, "
        "where each rank holds all of them: 2 + 2 + K bytes for each parameter.",
        "Each stage divides one more summand by the ranks, and keeps what the stage before it "
        "divided: first the optimizer state, then gradients, then parameters.",
        "`state / ranks if stage >= 1 else state` is the first summand. What is sharded does not "
        "disappear: 1/N of it is still there.",
    )
    slips = (
        # The stages.
        Slip("You divide everything by the ranks, whatever the stage. Only stage 3 shards "
             "everything; stage 0 is DDP, where each rank holds all of it.",
             {"stage >= 1": "True", "stage >= 2": "True", "stage >= 3": "True"}),
        Slip("Your stages are off by one: you begin to shard in stage 2. Stage 0 is DDP, and "
             "stage 1 shards the optimizer state.", {"stage >=": "stage >"}),
        Slip("Your stage 2 has whole gradients. It shards them, besides the optimizer state: 1/N "
             "of each stays on a rank.", {"stage >= 2": "stage >= 3"}),
        Slip("You leave out the gradients where they are sharded. They are not gone: 1/N of them "
             "stays on each rank.", {"gradients = gradient / ranks": "gradients = 0"},
             {"gradients = gradient / ranks":
              "gradients = (stage == 3) * gradient / ranks"}),
        Slip("Your stages 2 and 3 shard no more than stage 1. Stage 2 adds the gradients, stage 3 "
             "the parameters.", {"stage >= 2": "False", "stage >= 3": "False"}),
        Slip("Your stage 3 has whole parameters. It shards them, too.", {"stage >= 3": "False"}),
        Slip("In each stage you shard one thing alone. A stage shards one thing *more*: stage 2 "
             "the optimizer state and the gradients, stage 3 everything.",
             {"stage >=": "stage =="}),
        Slip("In each stage you divide again what the stage before it has divided. A part is "
             "divided once, and stays so.",
             {"state / ranks": "state / ranks**stage", "gradient / ranks":
              "gradient / ranks ** (stage - 1)"}),
        Slip("(N−1)/N is the part that a rank gives away, or is sent. It keeps 1/N.",
             {"/ ranks": "* (ranks - 1) / ranks"}),
        Slip("You shard in the order parameters, gradients, optimizer state. It is the reverse: "
             "the optimizer state, which is largest, goes first.",
             {"stage >= 1": "stage > 2", "stage >= 3": "stage >= 1"}),
        Slip("Your stage 0 divides all, as stage 3 does (a last `else`?). It is DDP: nothing is "
             "divided.", {"optimizer = state": "stage = stage or 3\noptimizer = state"}),
        Slip("In stage 3 you count the parameters twice, as shards and gathered. What is whole "
             "for a moment is no model state: count what a rank keeps.",
             {"weights = parameter / ranks": "weights = parameter + parameter / ranks"}),
        # The bytes of each part.
        Slip("You left out the gradients, which each rank holds beside the parameters.",
             {"weights + gradients": "weights"}),
        Slip("You took 2 bytes for parameters and gradients. They have other sizes in fp32, or "
             "where gradients add up in fp32: take the first two numbers of `each`.",
             {"optimizer = state": "parameter = gradient = 2\noptimizer = state"}),
        Slip("You took a gradient to be as large as its parameter. It is `each[1]`: Megatron keeps "
             "bf16 parameters and adds gradients up in fp32.",
             {"optimizer = state": "gradient = parameter\noptimizer = state"}),
        Slip("You added an fp32 copy of the parameters to the optimizer's bytes. Where there is "
             "such a copy, `each[2]` counts it already.",
             {"optimizer = state": "state += 4\noptimizer = state"}),
        Slip("You took a number for the optimizer's bytes. They are 8 for Adam's two moments in "
             "fp32 and 12 with an fp32 copy of the parameters: take the third number of `each`.",
             {"optimizer = state": "state = 8\noptimizer = state"},
             {"optimizer = state": "state = 12\noptimizer = state"}),
        # The sum.
        Slip("You return GB. The function returns bytes; divide when you print.",
             {"return parameters": "return parameters / 1e9"}),
        Slip("You return GiB, of 2³⁰ bytes. The function returns bytes; and the GB of papers and "
             "data sheets are 10⁹.", {"return parameters": "return parameters / 2**30"}),
        Slip("You return the bytes of all ranks together. What has to fit is one rank's part.",
             {"return parameters": "return ranks * parameters"}),
    )


def _terms(parameters, ranks, each):
    names = ("the parameters", "the gradients", "the optimizer state")
    shares = {"": 1, "1/N of ": 1 / ranks, "N times ": ranks}
    return {f"{share}{name}": size * factor * parameters
            for name, size in zip(names, each, strict=True) for share, factor in shares.items()}


def _of_case(*case):
    return "bytes_per_rank({}, {:_}, {}, {})".format(*case)

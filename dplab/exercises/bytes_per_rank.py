"""Exercise 8.1: the memory of a configuration, on paper."""

from dplab.checks.exercise import Calculation, Mistake

# stage, parameters, ranks, K
CASES = (*((stage, 70_000_000_000, 8, 8) for stage in range(4)),
         *((stage, 7_500_000_000, 64, 12) for stage in range(4)),
         (2, 1_000_003, 3, 16), (3, 124_439_808, 1, 12))


def bytes_per_rank(stage, parameters, ranks, K):
    optimizer = K / ranks if stage >= 1 else K
    gradients = 2 / ranks if stage >= 2 else 2
    weights = 2 / ranks if stage >= 3 else 2
    return parameters * (weights + gradients + optimizer)


def _states(first=(3, 2, 1), sizes=(2, 2), optimizer=lambda K: K, total=sum, only=False,
            share=lambda ranks, stages: 1 / ranks):
    """The bytes with one thing wrong; ``first``: the stage from which on each part is sharded."""

    def attempt(stage, parameters, ranks, K):
        parts = []
        for begin, size in zip(first, (*sizes, optimizer(K)), strict=True):
            is_sharded = stage == begin if only else stage >= begin
            parts.append(parameters * size * (share(ranks, stage - begin) if is_sharded else 1.0))
        return total(parts)

    return attempt


class BytesPerRank(Calculation):
    number = "8.1"
    title = "The memory of a configuration, on paper"
    minutes = 10
    hints = (
        "Three summands: parameters, gradients, optimizer state. Write them down for stage 0, "
        "where each rank holds all of them: 2 + 2 + K bytes for each parameter.",
        "Each stage divides one more summand by the ranks, and keeps what the stage before it "
        "divided: first the optimizer state, then gradients, then parameters.",
        "`K / ranks if stage >= 1 else K` is the first summand. What is sharded does not "
        "disappear: 1/N of it is still there.",
    )
    solution = staticmethod(bytes_per_rank)
    mistakes = (
        Mistake(_states((0, 0, 0)), "You divide everything by the ranks, whatever the stage. Only "
                "stage 3 shards everything; stage 0 is DDP, where each rank holds all of it."),
        Mistake(_states((4, 3, 2)), "Your stages are off by one: you begin to shard in stage 2. "
                "Stage 0 is DDP, and stage 1 shards the optimizer state."),
        Mistake(_states((3, 3, 1)), "Your stage 2 has whole gradients. It shards them, besides the "
                "optimizer state: 1/N of each stays on a rank."),
        *(Mistake(lambda *case, gone=gone: bytes_per_rank(*case) - 2 * case[1] / case[2] *
                  (case[0] in gone), "You leave out the gradients where they are sharded. They are "
                  "not gone: 1/N of them stays on each rank.") for gone in ((2,), (2, 3))),
        Mistake(_states((4, 4, 1)), "Your stages 2 and 3 shard no more than stage 1. Stage 2 adds "
                "the gradients, stage 3 the parameters."),
        Mistake(_states((4, 2, 1)), "Your stage 3 has whole parameters. It shards them, too."),
        Mistake(_states(only=True), "In each stage you shard one thing alone. A stage shards one "
                "thing *more*: stage 2 the optimizer state and the gradients, stage 3 everything."),
        Mistake(_states(share=lambda ranks, stages: 1 / ranks ** (1 + stages)), "In each stage you "
                "divide again what the stage before it has divided. A part is divided once, and "
                "stays so."),
        Mistake(_states(share=lambda ranks, stages: (ranks - 1) / ranks), "(N−1)/N is the part "
                "that a rank gives away, or is sent. It keeps 1/N."),
        Mistake(_states((1, 2, 3)), "You shard in the order parameters, gradients, optimizer "
                "state. It is the reverse: the optimizer state, which is largest, goes first."),
        Mistake(_states(sizes=(2, 0)), "You left out the gradients: they have 2 bytes for each "
                "parameter, beside the parameters' own 2."),
        Mistake(lambda stage, *rest: bytes_per_rank(stage or 3, *rest), "Your stage 0 divides all, "
                "as stage 3 does (a last `else`?). It is DDP: nothing is divided."),
        Mistake(lambda *case: bytes_per_rank(*case) + 2.0 * case[1] * (case[0] == 3), "In stage 3 "
                "you count the parameters twice, as shards and gathered. What is whole for a "
                "moment is no model state: count what a rank keeps."),
        *(Mistake(_states(sizes=sizes), "You took 4 bytes for parameters or gradients. In mixed "
                  "precision they have 2 each; what is kept in fp32 is in K.")
          for sizes in ((4, 4), (2, 4), (4, 2))),
        Mistake(_states(optimizer=lambda K: K + 4), "You added an fp32 copy of the parameters to "
                "K. K is all that the optimizer keeps: where there is such a copy, it is in K."),
        *(Mistake(_states(optimizer=lambda K, number=number: number), "You took a number for K. It "
                  "is 8 for Adam's two moments in fp32 and 12 with an fp32 master copy, so it is "
                  "an argument: use `K`.") for number in (8, 12)),
        Mistake(_states(total=lambda parts: sum(parts) / 1e9), "You return GB. The function "
                "returns bytes; divide when you print."),
        Mistake(_states(total=lambda parts: sum(parts) / 2**30), "You return GiB, of 2³⁰ bytes. "
                "The function returns bytes; and the GB of papers and data sheets are 10⁹."),
        Mistake(lambda stage, parameters, ranks, K: ranks * bytes_per_rank(stage, parameters,
                ranks, K), "You return the bytes of all ranks together. What has to fit is one "
                "rank's part."),
    )

    def trial(self, attempt):
        return {_of_case(*case): attempt(*case) for case in CASES}

    def expected(self, world_size):
        return {_of_case(*case): float(bytes_per_rank(*case)) for case in CASES}


def _of_case(*case):
    return "bytes_per_rank({}, {:_}, {}, {})".format(*case)

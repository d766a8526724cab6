"""How long a rank has to compute, for little of an all-reduce to show."""

import math

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
    gradient_bytes = 2 * sum(parameters for parameters, _ in parts)
    all_reduce = 2 * (ranks - 1) / ranks * gradient_bytes / bandwidth
    forward = 2 * sum(parameters * uses for parameters, uses in parts) * tokens / flops
    backward = 2 * forward
    computing = forward + backward  # of one micro-batch
    exposed = max(0.0, all_reduce - backward)  # only the last micro-batch's backward hides
    # exposed = share * (count * computing + exposed), solved for the count
    count = math.ceil(exposed * (1 - share) / share / computing)
    return max(1, count) * tokens


CASES = (
    ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 4e14, 50e9, 0.05),  # dense, with an embedding
    ([(23.5e6, 170), (2e6, 1)], 32, 16, 5e13, 1.25e9, 0.08),  # convolutions
    ([(2e9, 1), (40e9, 0.25), (0.3e9, 0)], 2048, 8, 5e14, 45e9, 0.02),  # experts
    ([(6e8, 1)], 3000, 2, 1e14, 2e10, 0.3),
    ([(1.3e9, 1), (0.7e9, 2)], 24, 6, 2e14, 1.1e10, 0.45),  # hundreds of micro-batches
    ([(8e9, 1)], 65_536, 8, 4e14, 450e9, 0.01),  # hidden
    ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 8e14, 4e11, 0.01),  # hidden by the other part
    ([(8e9, 1)], 512, 1, 4e14, 1e9, 0.01),  # one rank
)


class TokensBetweenSyncs(Calculation):
    number = "6.2"
    title = "Tokens between two synchronisations"
    minutes = 20
    solution = staticmethod(tokens_between_syncs)

    def trial(self, attempt):
        return of_cases(_facts_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_facts_of, CASES, tokens_between_syncs)

    hints = (
        "Write down three times, for one micro-batch: its forward, its backward, the all-reduce. "
        "On which of the three do more micro-batches have no influence?",
        "With k micro-batches, the step is k forwards and backwards, and what is exposed. The "
        "gradient is complete in the last backward only: how much can that one hide?",
        "exposed = max(0, all-reduce − one backward). You need the smallest whole k of 1 or more "
        "with exposed ≤ share · (k · (forward + backward) + exposed).",
    )
    slips = (
        # The all-reduce.
        Slip("You have half the bytes. A number of the gradient has 2 bytes, and a ring sends "
             "2(N−1)/N times the gradient. One of these factors of 2 is missing.",
             {"2 * sum(parameters for": "sum(parameters for"}),
        Slip("You have twice the ratio of bytes to operations. A number of the gradient has 2 "
             "bytes here, and a multiplication and an addition are two operations.",
             {"gradient_bytes = 2 *": "gradient_bytes = 4 *"}),
        Slip("You count 8 bits for each byte. The bandwidth is in bytes a second.",
             {"/ bandwidth": "* 8 / bandwidth"}),
        Slip("You left out the number of ranks: a ring sends 2(N−1)/N times the gradient, which "
             "is 0 on one rank.", {"2 * (ranks - 1) / ranks": "2"}),
        Slip("You let each rank send its gradient to each other one. A ring sends 2(N−1)/N times "
             "the gradient.", {"2 * (ranks - 1) / ranks": "(ranks - 1)"}),
        Slip("You leave out the parameters that no token multiplies. They have gradients too, "
             "which are sent.",
             {"for parameters, _ in parts)": "for parameters, uses in parts if uses)"}),
        Slip("You take bytes and operations from one count. Each parameter has one gradient to "
             "send, and each *use* of it for a token takes two operations.",
             {"parameters for parameters, _ in": "parameters * uses for parameters, uses in"},
             {"parameters * uses for": "parameters for"}),
        # Computing.
        Slip("You take the mean of the uses over the parts. A part with more parameters has more "
             "operations: add up parameters times uses.",
             {"sum(parameters * uses for parameters, uses in parts)": "sum(parameters for "
              "parameters, _ in parts) * sum(uses for _, uses in parts) / len(parts)"}),
        Slip("You let a rank compute the micro-batches of all ranks. `tokens` are those of one "
             "rank's.", {"* tokens / flops": "* tokens * ranks / flops"}),
        Slip("Your backward takes as long as forward. It has two products for each of forward's: "
             "one for the gradient of the weights, one for that of the input.",
             {"backward = 2 * forward": "backward = forward"}),
        Slip("Your step has no forward. The share is that of the whole step, and each micro-batch "
             "has a forward.", {"computing = forward + backward": "computing = backward"}),
        # What is exposed.
        Slip("You count the whole all-reduce as exposed. The last micro-batch's backward hides "
             "some of it.", {"max(0.0, all_reduce - backward)": "all_reduce"}),
        Slip("You let forward hide communication too. While forward runs there are no gradients "
             "to send yet.", {"all_reduce - backward": "all_reduce - backward - forward"}),
        Slip("You compare sending with backward part by part. A backward can send from its first "
             "moment on, so the backward of one part hides another's sending too: add up both "
             "first.",
             {"max(0.0, all_reduce - backward)": "sum(max(0.0, 4 * (ranks - 1) / ranks * each / "
              "bandwidth - 4 * each * uses * tokens / flops) for each, uses in parts)"}),
        # The count.
        Slip("You let the backward of every micro-batch hide. The gradient is complete in the "
             "last one only, so only that one hides.",
             {"exposed * (1 - share) / share / computing":
              "all_reduce * (1 - share) / (share * computing + (1 - share) * backward)"}),
        Slip("You compare what is exposed with computing alone. The share is that of the whole "
             "step, the exposed time included.", {"* (1 - share) / share": "/ share"}),
        Slip("You compare the whole all-reduce with computing. Asked for is only what is "
             "*exposed*, as a share of the whole step, which has forward, backward and the "
             "exposed time.",
             {"exposed * (1 - share) / share": "all_reduce / share"},
             {"exposed * (1 - share) / share / computing": "all_reduce / share / backward"}),
        Slip("Your step contains the whole all-reduce. What backward hides adds no time to the "
             "step: only the exposed part does.",
             {"exposed * (1 - share) / share": "(exposed / share - all_reduce)"}),
        # The tokens.
        Slip("You round to the nearest number. Where that is the lower one, the share is "
             "exceeded: take the next whole number of micro-batches.", {"math.ceil": "round"}),
        Slip("You round down, so the share is exceeded. Take the next whole number of "
             "micro-batches.", {"math.ceil": "math.floor"}),
        Slip("That is one micro-batch more than it takes.",
             {"max(1, count)": "(max(1, count) + 1)"}, {"max(1, count)": "max(1, count + 1)"}),
        Slip("Where all is hidden, one micro-batch is enough, but there must be one: return its "
             "tokens, not 0.", {"max(1, count)": "count"}),
        Slip("A rank runs whole micro-batches: round up to a multiple of `tokens`.",
             {"math.ceil(": "(", "max(1, count) * tokens":
              "max(tokens, math.ceil(count * tokens))"}),
        Slip("You return how many micro-batches it takes. Asked for are tokens: multiply by those "
             "of a micro-batch.", {"count) * tokens": "count)"}),
        Slip("These are the tokens of all ranks. Asked for are those of one.",
             {"count) * tokens": "count) * tokens * ranks"}),
    )


def _facts_of(case, answer):
    parts, tokens, ranks, flops, bandwidth, share = case
    model = " and ".join(f"{each:g} parameters used {uses:g} times" for each, uses in parts)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return {f"the tokens for {model}, micro-batches of {tokens:,}, {ranks} ranks, {flops:g} "
            f"operations/s, {bandwidth:g} bytes/s and a share of {share:g}": answer}

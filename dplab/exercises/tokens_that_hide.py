"""How many tokens a GPU needs in a micro-batch so that computing hides what FSDP sends."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def tokens_that_hide(parameters, ranks, flops, bandwidth, latency, gathered, reduced):
    def ring(element):
        share = (ranks - 1) / ranks
        return (ranks - 1) * latency + share * element * parameters / bandwidth

    gather, scatter = ring(gathered), ring(reduced)
    forward = 2 * parameters / flops  # of a token
    backward = 2 * forward
    return max(gather / forward, (gather + scatter) / backward)


# Parameters, ranks, flops, bandwidth, latency, bytes gathered and reduced.
CASES = (
    (218e6, 64, 7.5e14, 50e9, 0.0, 2, 4),  # bytes alone: backward decides
    (218e6, 64, 7.5e14, 50e9, 14e-6, 2, 4),
    (218e6, 2048, 7.5e14, 50e9, 14e-6, 2, 2),  # messages alone, nearly
    (1e6, 8, 1e14, 3e9, 2e-5, 4, 1),  # forward decides
    (5e7, 3, 2e13, 1e9, 1e-4, 4, 4),
    (4e7, 5, 3e13, 2e9, 1e-5, 1, 4),  # gathered in 8 bits
    (9e6, 1, 1e13, 1e9, 1e-3, 2, 4),  # nothing to send
)
RING = "(ranks - 1) * latency + share * element * parameters / bandwidth"
RESULT = "max(gather / forward, (gather + scatter) / backward)"


class TokensThatHide(Calculation):
    number = "11.2"
    title = "Tokens that hide what is sent"
    minutes = 15
    solution = staticmethod(tokens_that_hide)

    def trial(self, attempt):
        return of_cases(_fact_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(_fact_of, CASES, tokens_that_hide)

    hints = (
        "Two conditions: one for a block's forward, one for its backward. What runs beside each of "
        "them, in the middle of a step?",
        "A ring's gather has N − 1 messages, each with an N-th of the unit. So it takes (N − 1) · "
        "latency, and (N − 1)/N of the unit's bytes over the bandwidth. And a reduce-scatter?",
        "forward = 2P/C seconds a token, backward twice that. T tokens hide both if T · forward ≥ "
        "gather and T · backward ≥ gather + reduce-scatter. Return the least such T.",
    )
    slips = (
        Slip("You ask forward alone. In backward a block has to hide a gather and a "
             "reduce-scatter.", {RESULT: "gather / forward"}),
        Slip("You ask backward alone. Forward has half of its time, and has to hide a gather.",
             {RESULT: "(gather + scatter) / backward"}),
        Slip("You let backward hide the reduce-scatter alone. The block before it is gathered "
             "again in the same time, and one follows the other.",
             {"(gather + scatter) / backward": "scatter / backward"}),
        Slip("You take the smaller of the two numbers. Both forward and backward have to hide what "
             "runs beside them.", {RESULT: "min(gather / forward, (gather + scatter) / backward)"}),
        Slip("You add the two conditions up. Forward and backward each hide their own.",
             {RESULT: "gather / forward + (gather + scatter) / backward"}),
        Slip("You divide all that is sent by all that is computed. What forward has left over "
             "hides nothing in backward.",
             {RESULT: "(2 * gather + scatter) / (forward + backward)"}),
        Slip("Forward has two operations for each parameter and token, since it multiplies and "
             "adds. And a gather has N − 1 messages; it is an all-reduce that has 2(N − 1).",
             {"2 * parameters / flops": "parameters / flops"}, {RING: f"2 * ({RING})"}),
        Slip("Your backward takes as long as forward. It has two products for each of forward's.",
             {"2 * forward": "forward"}),
        Slip("You count the messages of backward once. A gather and a reduce-scatter run beside "
             "it, and each has N − 1 of them.",
             {"(gather + scatter) / backward":
              "(gather + scatter - (ranks - 1) * latency) / backward"}),
        Slip("You leave the latency out. With many ranks it is most of a gather.",
             {"(ranks - 1) * latency + ": ""}),
        Slip("You count the latency once. A ring has N − 1 messages, one after the other.",
             {"(ranks - 1) * latency": "latency"}),
        Slip("Each rank sends (N − 1)/N of a unit, not all of it, and with one rank nothing.",
             {"share * element": "element"}, {"share * element": "(ranks > 1) * element"}),
        Slip("You let each message carry the whole unit. A ring's carry an N-th of it.",
             {"share * element": "(ranks - 1) * element"}),
        Slip("You gather and reduce the same bytes. They are `gathered` and `reduced`.",
             {"ring(gathered), ring(reduced)": "ring(reduced), ring(reduced)"}),
        Slip("You exchanged the bytes: parameters are gathered, gradients reduced.",
             {"ring(gathered), ring(reduced)": "ring(reduced), ring(gathered)"}),
        Slip("These are the tokens of all ranks. Asked are those of one.",
             {"return max": "return ranks * max"}),
    )


def _fact_of(case, answer):
    parameters, ranks, flops, bandwidth, latency, gathered, reduced = case
    return {f"the tokens (P = {parameters:g}, N = {ranks:,}, {flops:g} FLOP/s, {bandwidth:g} B/s, "
            f"{latency:g} s, {gathered} and {reduced} bytes)":
            float(answer) if isinstance(answer, int) else answer}

"""The number of ranks on which an all-reduce takes as long as the products."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def ranks_at_equal_times(b, d, h, flops, bandwidth, element):
    operations = 2 * 2 * b * d * h  # of both products, on all N ranks together
    sent = 2 * element * b * d  # bytes, of which a rank sends (N−1)/N
    # operations / N / flops = (N − 1) / N · sent / bandwidth: 1/N stands on both sides.
    ratio = (operations / flops) / (sent / bandwidth)
    return 1 + ratio


# b, d, h, flops, bandwidth, element
CASES = ((300, 700, 900, 2e12, 3e9, 4), (5120, 2048, 16384, 989e12, 450e9, 2),
         (64, 96, 512, 9e10, 1e9, 4), (8, 640, 30, 3e13, 5e12, 1), (32, 512, 65536, 3e11, 4e11, 4))


class RanksAtEqualTimes(Calculation):
    number = "B.4"
    title = "Where the all-reduce takes half of the time"
    minutes = 15
    solution = staticmethod(ranks_at_equal_times)

    def trial(self, attempt):
        return of_cases(ranks_of, CASES, attempt)

    def expected(self, world_size):
        return of_cases(ranks_of, CASES, ranks_at_equal_times)

    hints = (
        "Two times must be equal. Which products does a rank compute in forward, with which "
        "shapes? What does it send, and of which shape?",
        "A product of (b, d) and (d, h / N) takes `2 * b * d * h / N` operations. An all-reduce of "
        "a tensor makes a rank send 2(N−1)/N times its bytes. Write both times, and cancel what "
        "stands on both sides.",
        "`4 * b * d * h / N / flops = 2 * (N - 1) / N * element * b * d / bandwidth`: b, d and the "
        "1/N cancel. Solve for N − 1.",
    )
    slips = (
        # The products.
        Slip("Your N − 1 is half of what it should be. Did you count one product? Forward has two, "
             "one for each layer. Or multiplications alone? Each comes with an addition. Or two "
             "all-reduces? One serves both layers.", {"2 * 2 * b": "2 * b"}),
        Slip("You counted the products of backward too, and not its all-reduce. The question is "
             "about forward alone.", {"2 * 2 * b": "6 * 2 * b"}),
        Slip("You counted backward too. The question is about forward alone.",
             {"2 * 2 * b": "6 * 2 * b", "= 2 * element": "= 4 * element"}),
        Slip("You let every rank compute the whole products. Each rank has 1/N of h, so its "
             "products take 1/N of the time.", {"1 + ratio": "1 / (1 - ratio)"}),
        # The all-reduce.
        Slip("Your N − 1 is twice what it should be. Did you let a rank send (N−1)/N of the "
             "output? That is a reduce-scatter alone, and an all-reduce is twice that. Or did you "
             "count the additions twice? 2 · b · d · h / N has them.",
             {"= 2 * element": "= element"}),
        Slip("You let a rank send the output once. In an all-reduce it sends 2(N−1)/N times the "
             "tensor.", {"1 + ratio": "2 * ratio"}),
        Slip("Your answer is one too small. Either it is N − 1, or you took 2 for 2(N−1)/N, which "
             "is right for many ranks only: keep N on both sides.", {"1 + ratio": "ratio"}),
        Slip("You divided the all-reduce among the ranks. Every rank has partial sums of the "
             "*whole* output, so it sends 2(N−1)/N times the whole.",
             {"1 + ratio": "(1 + (1 + 4 * ratio) ** 0.5) / 2"}),
        Slip("You let the ranks send the hidden activations, of shape (b, h). What is summed is "
             "the output, of shape (b, d).", {"element * b * d": "element * b * h"}),
        Slip("You let the ranks send gradients of weights. In forward the ranks add up the output, "
             "of shape (b, d).", {"element * b * d": "element * 2 * d * h"}),
        Slip("You counted numbers and not bytes. An output of `b * d` numbers has `element * b * "
             "d` bytes.", {"element * b": "b"}),
        Slip("You took 2 bytes for every number. `element` says how many there are: 4 in fp32.",
             {"element * b": "2 * b"}),
        Slip("You multiplied by 8. `bandwidth` is in bytes a second already.",
             {"sent / bandwidth": "8 * sent / bandwidth"},
             {"sent / bandwidth": "sent / bandwidth / 8"}),
        # The answer.
        Slip("Your fraction is upside down: with a faster link the times are equal at more ranks, "
             "and with a faster device at fewer.", {"1 + ratio": "1 + 1 / ratio"}),
        Slip("You rounded. Return the number as it comes: a part of a rank is fine here.",
             {"1 + ratio": "int(1 + ratio)"}, {"1 + ratio": "round(1 + ratio)"},
             {"1 + ratio": "int(2 + ratio)"}),
        Slip("This is how many of the h columns each rank has. Return the number of ranks.",
             {"1 + ratio": "h / (1 + ratio)"}),
    )


def ranks_of(case, answer):
    b, d, h, flops, bandwidth, element = case
    return {f"`ranks_at_equal_times({b}, {d}, {h}, {flops:g}, {bandwidth:g}, {element})`": (
        float(answer) if isinstance(answer, int) else answer)}

"""Exercise 6.2: tokens between two synchronisations."""

import math

from dplab.checks.exercise import Calculation, Mistake
from dplab.checks.trials import of_cases


def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
    gradient_bytes = 2 * sum(parameters for parameters, _ in parts)
    all_reduce = 2 * (ranks - 1) / ranks * gradient_bytes / bandwidth
    forward = 2 * sum(parameters * uses for parameters, uses in parts) * tokens / flops
    backward = 2 * forward
    exposed = max(0.0, all_reduce - backward)  # only the last micro-batch's backward hides
    # exposed = share * (count * (forward + backward) + exposed), solved for the count
    count = exposed * (1 - share) / share / (forward + backward)
    return max(1, math.ceil(count)) * tokens


def with_exposed(exposed_of, count_of=lambda exposed, share, step: exposed * (1 - share) / share
                 / step, backward_per_forward=2.0):
    """A function with another idea of what is exposed, or of how many micro-batches that takes."""
    def attempt(parts, tokens, ranks, flops, bandwidth, share):
        all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
        forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
        backward = backward_per_forward * forward
        exposed = max(0.0, exposed_of(all_reduce, forward, backward))
        return max(1, math.ceil(count_of(exposed, share, forward + backward))) * tokens

    return attempt


def nothing_hides(all_reduce, forward, backward):
    return all_reduce


def forward_hides_too(all_reduce, forward, backward):
    return all_reduce - backward - forward


def backward_hides(all_reduce, forward, backward):
    return all_reduce - backward


def share_of_computing(exposed, share, step):
    return exposed / share / step


def share_of_backward(exposed, share, step):
    return exposed * (1 - share) / share / (2 / 3 * step)


def exposed_beside_backward(exposed, share, step):
    return exposed / share / (2 / 3 * step)


def all_reduce_beside(part_of_the_step):
    """A function that takes the ratio to a part of computing, and divides it by the share."""
    return with_exposed(nothing_hides, lambda all_reduce, share, step:
                        all_reduce / share / (part_of_the_step * step))


def part_by_part(parts, tokens, ranks, flops, bandwidth, share):
    exposed = computing = 0.0
    for parameters, uses in parts:
        all_reduce = 2 * (ranks - 1) / ranks * 2 * parameters / bandwidth
        backward = 4 * parameters * uses * tokens / flops
        exposed += max(0.0, all_reduce - backward)
        computing += 1.5 * backward
    return max(1, math.ceil(exposed * (1 - share) / share / computing)) * tokens


def mean_of_the_uses(parts, tokens, ranks, flops, bandwidth, share):
    uses = sum(each for _, each in parts) / len(parts)
    return tokens_between_syncs([(sum(each for each, _ in parts), uses)], tokens, ranks, flops,
                                bandwidth, share)


def all_reduce_in_the_step(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    exposed = max(0.0, all_reduce - 2 * forward)
    return max(1, math.ceil((exposed / share - all_reduce) / (3 * forward))) * tokens


def to_the_nearest(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return round(exposed * (1 - share) / share / step)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def rounds_down(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return math.floor(exposed * (1 - share) / share / step)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def one_more(parts, tokens, ranks, flops, bandwidth, share):
    def count(exposed, share, step):
        return math.floor(exposed * (1 - share) / share / step) + 1 + (exposed > 0)

    return with_exposed(backward_hides, count)(parts, tokens, ranks, flops, bandwidth, share)


def every_backward_hides(parts, tokens, ranks, flops, bandwidth, share):
    count = 1
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    while True:
        exposed = max(0.0, all_reduce - count * 2 * forward)
        if exposed <= share * (3 * count * forward + exposed):
            return count * tokens
        count += 1


def counts_micro_batches(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share) // tokens


def no_whole_micro_batches(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    forward = 2 * sum(each * uses for each, uses in parts) * tokens / flops
    exposed = max(0.0, all_reduce - 2 * forward)
    return max(tokens, math.ceil(exposed * (1 - share) / share / (3 * forward) * tokens))


def half_the_bytes(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, 2 * bandwidth, share)


def forgets_the_ranks(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, 10**12, flops, bandwidth, share)


def to_every_rank(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth * 2 / ranks, share)


def four_bytes(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth / 2, share)


def bits(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth / 8, share)


def multiplies_only(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs(parts, tokens, ranks, 2 * flops, bandwidth, share)


def all_used_once(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs([(each, 1) for each, _ in parts], tokens, ranks, flops, bandwidth,
                                share)


def sends_what_it_uses(parts, tokens, ranks, flops, bandwidth, share):
    used = sum(each * uses for each, uses in parts)
    return tokens_between_syncs([(used, 1)], tokens, ranks, flops, bandwidth, share)


def without_the_unused(parts, tokens, ranks, flops, bandwidth, share):
    return tokens_between_syncs([part for part in parts if part[1] > 0], tokens, ranks, flops,
                                bandwidth, share)


def zero_where_hidden(parts, tokens, ranks, flops, bandwidth, share):
    all_reduce = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
    if all_reduce <= 4 * sum(each * uses for each, uses in parts) * tokens / flops:
        return 0
    return tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share)


class TokensBetweenSyncs(Calculation):
    number = "6.2"
    title = "Tokens between two synchronisations"
    minutes = 20
    hints = (
        "Write down three times, for one micro-batch: its forward, its backward, the all-reduce. "
        "On which of the three do more micro-batches have no influence?",
        "With k micro-batches, the step is k forwards and backwards, and what is exposed. The "
        "gradient is complete in the last backward only: how much can that one hide?",
        "exposed = max(0, all-reduce − one backward). You need the smallest whole k of 1 or more "
        "with exposed ≤ share · (k · (forward + backward) + exposed).",
    )
    solution = staticmethod(tokens_between_syncs)
    mistakes = (
        Mistake(with_exposed(nothing_hides), "You count the whole all-reduce as exposed. The last "
                "micro-batch's backward hides some of it."),
        Mistake(with_exposed(forward_hides_too), "You let forward hide communication too. While "
                "forward runs there are no gradients to send yet."),
        Mistake(every_backward_hides, "You let the backward of every micro-batch hide. The "
                "gradient is complete in the last one only, so only that one hides."),
        Mistake(with_exposed(backward_hides, backward_per_forward=1.0), "Your backward takes as "
                "long as forward. It has two products for each of forward's: one for the gradient "
                "of the weights, one for that of the input."),
        Mistake(with_exposed(backward_hides, share_of_computing), "You compare what is exposed "
                "with computing alone. The share is that of the whole step, the exposed time "
                "included."),
        Mistake(with_exposed(backward_hides, share_of_backward), "Your step has no forward. The "
                "share is that of the whole step, and each micro-batch has a forward."),
        Mistake(with_exposed(backward_hides, exposed_beside_backward), "You compare what is "
                "exposed with backward alone. The share is that of the whole step: forward and "
                "the exposed time are parts of it too."),
        *(Mistake(all_reduce_beside(part), "You compare the whole all-reduce with computing. "
                  "Asked for is only what is *exposed*, as a share of the whole step, which has "
                  "forward, backward and the exposed time.") for part in (2 / 3, 1)),
        Mistake(all_reduce_in_the_step, "Your step contains the whole all-reduce. What backward "
                "hides adds no time to the step: only the exposed part does."),
        Mistake(part_by_part, "You compare sending with backward part by part. A backward can send "
                "from its first moment on, so the backward of one part hides another's sending "
                "too: add up both first."),
        Mistake(mean_of_the_uses, "You take the mean of the uses over the parts. A part with more "
                "parameters has more operations: add up parameters times uses."),
        Mistake(to_the_nearest, "You round to the nearest number. Where that is the lower one, the "
                "share is exceeded: take the next whole number of micro-batches."),
        Mistake(rounds_down, "You round down, so the share is exceeded. Take the next whole "
                "number of micro-batches."),
        Mistake(one_more, "That is one micro-batch more than it takes."),
        Mistake(counts_micro_batches, "You return how many micro-batches it takes. Asked for are "
                "tokens: multiply by those of a micro-batch."),
        Mistake(no_whole_micro_batches, "A rank runs whole micro-batches: round up to a multiple "
                "of `tokens`."),
        Mistake(half_the_bytes, "You have half the bytes. A number of the gradient has 2 bytes, "
                "and a ring sends 2(N−1)/N times the gradient. One of these factors of 2 is "
                "missing."),
        Mistake(forgets_the_ranks, "You left out the number of ranks: a ring sends 2(N−1)/N times "
                "the gradient, which is 0 on one rank."),
        Mistake(to_every_rank, "You let each rank send its gradient to each other one. A ring "
                "sends 2(N−1)/N times the gradient."),
        *(Mistake(attempt, "You have twice the ratio of bytes to operations. A number of the "
                  "gradient has 2 bytes here, and a multiplication and an addition are two "
                  "operations.") for attempt in (four_bytes, multiplies_only)),
        Mistake(bits, "You count 8 bits for each byte. The bandwidth is in bytes a second."),
        *(Mistake(attempt, "You take bytes and operations from one count. Each parameter has one "
                  "gradient to send, and each *use* of it for a token takes two operations.")
          for attempt in (all_used_once, sends_what_it_uses)),
        Mistake(without_the_unused, "You leave out the parameters that no token multiplies. They "
                "have gradients too, which are sent."),
        Mistake(zero_where_hidden, "Where all is hidden, one micro-batch is enough, but there must "
                "be one: return its tokens, not 0."),
    )
    CASES = (
        ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 4e14, 50e9, 0.05),  # dense, with an embedding
        ([(23.5e6, 170), (2e6, 1)], 32, 16, 5e13, 1.25e9, 0.08),  # convolutions
        ([(2e9, 1), (40e9, 0.25), (0.3e9, 0)], 2048, 8, 5e14, 45e9, 0.02),  # experts
        ([(6e8, 1)], 3000, 2, 1e14, 2e10, 0.3),
        ([(8e9, 1)], 65_536, 8, 4e14, 450e9, 0.01),  # hidden
        ([(7.5e9, 1), (0.5e9, 0)], 4096, 64, 8e14, 4e11, 0.01),  # hidden by the other part
        ([(8e9, 1)], 512, 1, 4e14, 1e9, 0.01),  # one rank
    )

    def trial(self, attempt):
        return of_cases(_tokens_facts, self.CASES, attempt)

    def expected(self, world_size):
        return of_cases(_tokens_facts, self.CASES, tokens_between_syncs)


def _tokens_facts(case, answer):
    parts, tokens, ranks, flops, bandwidth, share = case
    model = " and ".join(f"{each:g} parameters used {uses:g} times" for each, uses in parts)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return {f"the tokens for {model}, micro-batches of {tokens:,}, {ranks} ranks, {flops:g} "
            f"operations/s, {bandwidth:g} bytes/s and a share of {share:g}": answer}

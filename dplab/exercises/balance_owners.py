"""Which rank owns which matrix, where a step waits for the rank with the most work."""

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def choose_owners(shapes, ranks):
    def work(index):
        short, long = sorted(shapes[index])
        return 2 * short * short * long + short**3

    owners, loads = [0] * len(shapes), [0] * ranks
    for index in sorted(range(len(shapes)), key=work, reverse=True):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += work(index)
    return owners


# In each, a way of its own to share out is worse than 4/3 of the best.
CASES = (
    (((64, 64), (64, 64), (64, 256), (256, 64)) * 3, 4),
    (((96, 96), (16, 576)) * 2, 2),
    (((96, 96),) * 2 + ((16, 384),) * 3, 2),
    (((32, 32),) * 12 + ((32, 192),), 4),
    (((48, 160),) + ((32, 64),) * 5, 2),
    (((288, 32),) + ((32, 288),) * 3, 2),
    (((32, 288),) + ((288, 32),) * 3, 2),
    (((16, 16), (48, 64), (16, 48)), 5),
    (((32, 512),) * 3 + ((80, 80),) * 2, 4),
    (((40, 80), (80, 80)), 1),
    ((), 3),
)
BUSIEST = "that is what every rank waits for, and 4/3 of the least possible is the limit"


class BalanceOwners(Calculation):
    number = "D.1"
    title = "An owner for each matrix"
    minutes = 10
    solution = staticmethod(choose_owners)

    def trial(self, attempt):
        return of_cases(of_owners, CASES,
                        lambda shapes, ranks: [attempt(list(shapes), ranks) for _ in range(2)])

    def expected(self, world_size):
        facts = {}
        for case in CASES:
            valid, same, share = names_of_facts(case)
            facts |= {valid: True, same: True}
            if case[0]:
                facts[share] = AtMost(4 / 3, BUSIEST)
        return facts

    hints = (
        "Count the multiplications of one iteration, for a matrix with m rows and n columns, "
        "m ≤ n. There are three products. What happens to a matrix with more rows than columns?",
        "Keep a list with the load of each rank. Whom do you give the next matrix? And which "
        "matrix should come last: one that can still fill a gap, or one that makes a new one?",
        "2m²n + m³, where m is the shorter side. Go through the matrices from the most work to "
        "the least, and give each to the rank with the least load so far.",
    )
    slips = (
        Slip("You deal the matrices in turn, whatever their work. One may be many times the work "
             "of another, and its rank gets the next one all the same.",
             {"owners[index] = loads.index(min(loads))": "owners[index] = index % ranks"}),
        Slip("Your shares are those of sorted matrices that are dealt in turn, so that one rank "
             "gets the heaviest of each round. The same comes out if the lightest go first, or if "
             "a load counts matrices. What does a load add up, and which matrix goes first?",
             {"owners[index] = loads.index(min(loads))": "owners[index] = sum(loads) % ranks",
              "+= work(index)": "+= 1"},
             {"+= work(index)": "+= 1"}, {", reverse=True": ""}),
        Slip("You balance elements, which are bytes. The square matrix and the thin one have the "
             "same number of elements and not the same work: the shorter side counts twice.",
             {"2 * short * short * long + short**3": "short * long"}),
        Slip("You count as if all three products took the same. Two have m×n as a factor, but one "
             "multiplies the Gram matrix by itself: what does that take?",
             {"2 * short * short * long + short**3": "short * short * long"}),
        Slip("You take the matrices as they come. A heavy one at the end then comes on top of an "
             "even load. Does the order in which you share out matter?",
             {"sorted(range(len(shapes)), key=work, reverse=True)": "range(len(shapes))"}),
        Slip("You count tall matrices as if they were not turned. `orthogonalize` transposes one "
             "with more rows than columns, so the Gram matrix has the shorter side.",
             {"sorted(shapes[index])": "shapes[index]"}),
        Slip("The longer side counts twice in your work. The Gram matrix X Xᵀ has the shorter "
             "side: `orthogonalize` transposes a matrix with more rows than columns.",
             {"sorted(shapes[index])": "sorted(shapes[index], reverse=True)"},
             {"sorted(shapes[index])": "reversed(shapes[index])"}),
        Slip("One rank gets every matrix. Either its load does not grow with them, or a large load "
             "is what attracts the next.",
             {"index(min(loads))": "index(max(loads))"},
             {"loads[owners[index]] += work(index)": "pass"}),
        Slip("Your owners stand in the order in which you dealt. The list has them in the order of "
             "`shapes`.",
             {"return owners":
              "return [owners[i] for i in sorted(range(len(shapes)), key=work, reverse=True)]"}),
    )


def work_of(shape):
    """The multiplications of one iteration: two products of m²n and one of m³."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3


def names_of_facts(case):
    shapes, ranks = case
    kinds = {shape: shapes.count(shape) for shape in shapes}
    of = (f" for {' and '.join(f'{n} of {a}×{b}' for (a, b), n in kinds.items()) or 'no matrix'}"
          f" on {ranks} rank{'s' * (ranks > 1)}")
    return (f"that there is one owner, from 0 to {ranks - 1}, for each matrix{of}",
            f"that each call gives the same owners{of}",
            f"the busiest rank's work, as a multiple of the least possible,{of}")


def of_owners(case, answers):
    """The facts of two answers to the same case."""
    shapes, ranks = case
    valid, same, share = names_of_facts(case)
    first, second = map(_as_list, answers)
    is_valid = (first is not None and len(first) == len(shapes)
                and all(owner in range(ranks) for owner in first))
    facts = {valid: is_valid, same: first == second}
    if shapes:
        facts[share] = busiest(shapes, first, ranks) / least(shapes, ranks) if is_valid else None
    return facts


def busiest(shapes, owners, ranks):
    loads = [0] * ranks
    for shape, owner in zip(shapes, owners, strict=True):
        loads[owner] += work_of(shape)
    return max(loads)


def least(shapes, ranks):
    """What the busiest rank has at least, of all ways to share out."""
    ways = {(0,) * ranks}
    for shape in sorted(shapes, key=work_of, reverse=True):
        ways = {tuple(sorted((*loads[:rank], loads[rank] + work_of(shape), *loads[rank + 1:])))
                for loads in ways for rank in range(ranks)}
    return min(max(loads) for loads in ways)


def _as_list(owners):
    try:
        return [int(owner) for owner in owners]
    except TypeError:
        return None

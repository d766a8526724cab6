"""The exercise of the appendix on rounding: how far apart two right results may lie."""

import numbers

import torch

from dplab.exercises.compare import BESIDE
from dplab.exercises.exercise import Calculation, Mistake

# A.1


def rounding_limit(terms, dtype):
    n = len(terms)
    mean_length = terms.norm(dim=1).mean().item()
    return n * torch.finfo(dtype).eps * mean_length


# Each of these is what somebody writes at first. The exercise names it.


def _fixed_share_of_the_result(terms, dtype):
    return 1e-5 * terms.mean(dim=0).norm().item()


def _defaults_of_allclose(terms, dtype):
    return 1e-8 + 1e-5 * terms.mean(dim=0).norm().item()


def _eps_of_the_result(terms, dtype):
    return torch.finfo(dtype).eps * terms.mean(dim=0).norm().item()


def _n_eps_of_the_result(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.mean(dim=0).norm().item()


def _mean_of_all_elements(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.mean().abs().item()


def _without_n(terms, dtype):
    return torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


def _root_of_n(terms, dtype):
    return len(terms) ** 0.5 * torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


def _steps_of_a_tree(terms, dtype):
    depth = torch.tensor(len(terms)).log2().ceil().item()
    return depth * torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


def _of_the_sum(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.norm(dim=1).sum().item()


def _length_of_the_table(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.norm().item()


def _longest_term(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.norm(dim=1).max().item()


def _largest_element(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.abs().max().item()


def _mean_size_of_an_element(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.abs().mean().item()


def _along_the_wrong_axis(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.norm(dim=0).mean().item()


def _elements_for_n(terms, dtype):
    return terms.shape[1] * torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


def _numel_for_n(terms, dtype):
    return terms.numel() * torch.finfo(dtype).eps * terms.norm(dim=1).mean().item()


def _eps_of_the_terms(terms, dtype):
    return len(terms) * torch.finfo(terms.dtype).eps * terms.norm(dim=1).mean().item()


def _eps_of_float32(terms, dtype):
    return len(terms) * torch.finfo(torch.float32).eps * terms.norm(dim=1).mean().item()


def _fixed_share_of_the_terms(terms, dtype):
    return 1e-6 * terms.norm(dim=1).mean().item()


def _tiny(terms, dtype):
    return len(terms) * torch.finfo(dtype).tiny * terms.norm(dim=1).mean().item()


def _without_a_size(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps


def _squared_lengths(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.square().sum(dim=1).mean().item()


def _measured_once(terms, dtype):
    return (terms.to(dtype).mean(dim=0).double() - terms.mean(dim=0)).norm().item()


def _measured_twice(terms, dtype):
    rounded = terms.to(dtype)
    forward, backward = torch.zeros_like(rounded[0]), torch.zeros_like(rounded[0])
    for row in rounded:
        forward += row
    for row in rounded.flip(0):
        backward += row
    return (forward / len(terms) - backward / len(terms)).double().norm().item()


def _for_each_element(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.abs().mean(dim=0)


def _for_each_term(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.norm(dim=1)


def _verdict_in_place_of_a_limit(terms, dtype):
    rounded = terms.to(dtype).mean(dim=0).double()
    return torch.allclose(rounded, terms.mean(dim=0))


def _without_return(terms, dtype):
    rounding_limit(terms, dtype)


def _in_place(terms, dtype):
    return len(terms) * torch.finfo(dtype).eps * terms.square_().sum(dim=1).sqrt().mean().item()


RESULT = ("Your limit is relative to the result. Where the terms cancel, the result is small and "
          "the partial sums are not, and each addition rounds at the size of its partial sum. "
          "Take the size of what was added.")
SLOWER = ("Your limit grows more slowly than n. It holds for typical sums, or for one order, and "
          "not for every sum: equal terms, added one by one, round in the same direction each "
          "time. Count each of the n roundings in full.")
ELEMENT = ("You measure the size by single elements, and the distance is the length of a whole "
           "vector. Take the length of each term: `terms.norm(dim=1)`.")
ELEMENTS = ("You took the number of elements for n. Each element is a sum of its own, of n terms: "
            "n is `len(terms)`.")
FIXED = ("Your limit does not follow the dtype. A fixed share, or always float32's eps, is too "
         "little for bfloat16 and too much for float64. Take eps of the dtype in which the sums "
         "were made: `torch.finfo(dtype).eps`.")
MEASURED = ("You measure how one or two orders round. Others round by more, and the two programs "
            "may use any. Find what is possible at most.")
ONE_NUMBER = ("You return several limits. The distance is the length of the whole difference, so "
              "its limit is one number.")


class RoundingLimit(Calculation):
    slug = "rounding-limit"
    number = "A.1"
    title = "How far apart two right results may lie"
    name = "rounding_limit"
    minutes = 15
    hints = (
        "Take one element first. How many roundings stand between the n numbers and their mean? "
        "Each one is at most eps/2 times some partial sum. How large can a partial sum be, in any "
        "order?",
        "A partial sum is never larger than the sum of the absolute values, so one result is off "
        "by at most n · eps/2 times that sum, divided by n. Two results may be off in opposite "
        "directions. What does that say of two vectors, if you know the length of each term?",
        "Twice n · eps/2 is n · eps. The sum of the absolute values, divided by n, becomes the "
        "mean length of the terms: `terms.norm(dim=1).mean()`. eps is that of `dtype`, and not "
        "of `terms.dtype`.",
    )
    solution = staticmethod(rounding_limit)
    mistakes = (
        Mistake(_fixed_share_of_the_result, "You take a fixed share of the result. 1e-5 is too "
                "little for bfloat16, too much for float64, and knows nothing of n or of terms "
                "that cancel."),
        Mistake(_defaults_of_allclose, "These are the defaults of `torch.allclose`. 1e-5 is too "
                "little for bfloat16 and too much for float64, and 1e-8 is more than all of a "
                "tiny gradient. The limit must follow eps, n and the terms."),
        Mistake(_eps_of_the_result, f"{RESULT} And there are n roundings, not one."),
        Mistake(_n_eps_of_the_result, RESULT),
        Mistake(_mean_of_all_elements, "You average all elements, and positive ones cancel "
                "negative ones. Rounding depends on their sizes: take lengths before you "
                "average."),
        Mistake(_without_n, "You allow one rounding. A sum of n terms rounds n − 1 times, and the "
                "mean once more. How many roundings are there in two results?"),
        *(Mistake(attempt, SLOWER) for attempt in (_root_of_n, _steps_of_a_tree)),
        Mistake(_of_the_sum, "Your limit is that of the sum. The results are means, so each error "
                "is divided by n too: take the mean of the lengths, not their sum."),
        Mistake(_length_of_the_table, "`terms.norm()` is the length of the whole table. It grows "
                "with n, so your limit is too loose for many terms. Take each term's length, and "
                "then the mean."),
        Mistake(_longest_term, "You count every term as if it were the longest. One long term "
                "then hides that another is lost. Take the mean of the lengths."),
        *(Mistake(attempt, ELEMENT) for attempt in (_largest_element, _mean_size_of_an_element)),
        Mistake(_along_the_wrong_axis, "`norm(dim=0)` goes down a column: it gives a length for "
                "each element, over all terms. A term is a row: `dim=1`."),
        *(Mistake(attempt, ELEMENTS) for attempt in (_elements_for_n, _numel_for_n)),
        Mistake(_eps_of_the_terms, "You took eps from `terms.dtype`. The terms are given in "
                "float64 so that they are exact. Rounding happened in `dtype`."),
        *(Mistake(attempt, FIXED) for attempt in (_eps_of_float32, _fixed_share_of_the_terms)),
        Mistake(_tiny, "`tiny` is the smallest normal number. The relative step from one number "
                "to the next is `eps`."),
        Mistake(_without_a_size, "Your limit does not depend on the terms. eps is relative: "
                "larger numbers round by more. What is the size of what was added?"),
        Mistake(_squared_lengths, "You average squared lengths. A limit on a length must grow "
                "like the terms, not like their squares."),
        *(Mistake(attempt, MEASURED) for attempt in (_measured_once, _measured_twice)),
        *(Mistake(attempt, ONE_NUMBER) for attempt in (_for_each_element, _for_each_term)),
        Mistake(_verdict_in_place_of_a_limit, "You return a verdict. The function does not see "
                "the two results: it returns how far apart they may lie."),
        Mistake(_without_return, "It returns None. Is there a `return`?"),
        Mistake(_in_place, "You change the terms in place, and the caller still needs them."),
    )

    def prepare(self):
        return _cases()

    def trial(self, attempt):
        facts, beside = {"what it returns": "one number", "that the terms are left alone": True}, {}
        for name, terms, dtype, distance, _ in self.given:
            own, fact = terms.clone(), f"your verdict on {name}"
            limit = attempt(own, dtype)
            facts["that the terms are left alone"] &= torch.equal(own, terms)
            if (kind := _kind(limit)) == "one number":
                facts[fact] = "rounding" if distance <= float(limit) else "a mistake"
                beside[fact] = (f"  the distance is {distance:.2g}, and your limit is "
                                f"{float(limit):.2g}")
            else:
                facts |= {"what it returns": kind, fact: "none"}
        return facts | {BESIDE: beside}

    def expected(self, world_size):
        return {"what it returns": "one number", "that the terms are left alone": True,
                **{f"your verdict on {name}": verdict for name, *_, verdict in self.given}}


def _kind(limit):
    if limit is None:
        return "None"
    if isinstance(limit, bool):
        return "True or False"
    if isinstance(limit, torch.Tensor):
        return "one number" if limit.numel() == 1 else f"{limit.numel()} numbers"
    return "one number" if isinstance(limit, numbers.Real) else type(limit).__name__


def _cases():
    """(name, terms, dtype, distance, right verdict); all terms are exact in their dtype."""
    f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
    alike = _vectors(4000, 50, f32).abs()
    half = _vectors(12, 50, f32)
    opposed = torch.cat([half, -half * (1 + 2**-10)]).to(f32).double()
    mirrored = torch.cat([half, half.flip(0)])
    equal = torch.full((1000, 7), 1.25, dtype=f64)
    sparse = _vectors(4, 50, bf16)
    sparse[3, 15:] = 0
    rounding = [
        _two_orders("24 gradients in float32", _vectors(24, 50, f32), f32),
        _two_orders("24 gradients in float64", _vectors(24, 50, f64), f64),
        _two_orders("4 gradients in bfloat16", _vectors(4, 50, bf16), bf16),
        _two_orders("4 gradients in bfloat16, one of them mostly zeros", sparse, bf16),
        _two_orders("4 gradients of 20,000 elements in float32", _vectors(4, 20_000, f32), f32),
        _two_orders("12 gradients and nearly their opposites in float32", opposed, f32),
        _two_orders("12 gradients and the same in reverse in float32", mirrored, f32),
        _two_orders("24 gradients in float32, all 1e-5 as large",
                    _vectors(24, 50, f32) * 2**-17, f32),
        _two_orders("24 gradients in float32, all 1,000 times as large",
                    _vectors(24, 50, f32) * 1024, f32),
        _two_orders("4,000 gradients of one sign in float32", alike, f32),
        _two_orders("1,000 equal gradients in bfloat16", equal, bf16),
    ]
    four, wide = _vectors(4, 50, f32), _vectors(4, 20_000, f32)
    some, many = _vectors(500, 50, f32), _vectors(800, 3, f32)
    outlier = many.clone()
    outlier[5] *= 256
    small = four * 2**-30
    parts = _vectors(31, 50, f32)
    of_parts = torch.stack([part.mean(dim=0) for part in parts.split(8)]).mean(dim=0)
    mistakes = [
        _wrong("a sum in place of a mean of 4, in float32", four, f32, 4 * four.mean(dim=0)),
        _wrong("the plain mean of parts of 8, 8, 8 and 7, in float32", parts, f32, of_parts),
        _wrong("one of 500 gradients lost, in float32", some, f32, some[1:].mean(dim=0)),
        _wrong("one of 800 gradients lost, in float32", many, f32, many[1:].mean(dim=0)),
        _wrong("one of 800 gradients lost, where another is long, in float32", outlier, f32,
               outlier[:-1].mean(dim=0)),
        _wrong("one of 4 tiny gradients lost, in float32", small, f32, small[1:].mean(dim=0)),
        _wrong("one of 4 ranks in bfloat16, the others in float32", wide, f32,
               _first_through(wide, bf16)),
        _wrong("one of 4 ranks in float32, the others in float64", _vectors(4, 50, f64), f64,
               _first_through(_vectors(4, 50, f64), f32)),
    ]
    return rounding + mistakes


def _vectors(n, elements, dtype):
    """Vectors of different lengths, exact in the dtype."""
    generator = torch.Generator().manual_seed(n + elements)
    lengths = 0.5 + torch.rand(n, 1, generator=generator, dtype=torch.float64)
    directions = 2 * torch.rand(n, elements, generator=generator, dtype=torch.float64) - 1
    return (lengths * directions).to(dtype).double()


def _two_orders(name, terms, dtype):
    rounded = terms.to(dtype)
    one_by_one = torch.zeros_like(rounded[0])
    for row in rounded:
        one_by_one += row
    in_pairs = rounded
    while len(in_pairs) > 1:
        odd = in_pairs[len(in_pairs) // 2 * 2:]
        in_pairs = torch.cat([in_pairs[0:len(in_pairs) - len(odd):2] + in_pairs[1::2], odd])
    gap = one_by_one / len(terms) - in_pairs[0] / len(terms)
    return f"{name}, in two orders", terms, dtype, gap.double().norm().item(), "rounding"


def _wrong(name, terms, dtype, found):
    return name, terms, dtype, (found - terms.mean(dim=0)).norm().item(), "a mistake"


def _first_through(terms, dtype):
    terms = terms.clone()
    terms[0] = terms[0].to(dtype)
    return terms.mean(dim=0)


EXERCISES = (RoundingLimit,)

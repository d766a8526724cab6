"""The table of the stack: how the parts that a reader writes fit together, from `send` on.

``python -m dplab.checks.stack`` prints it. Whoever writes a part, its exercise, or a chapter that
uses it, keeps to `EVERY_PART` and to the part's stub. An exercise's check tests what they say,
since the parts after it rely on that. The course's own part is the right answer of its exercise.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dplab.checks import find
from dplab.checks.attempt_code import names_in
from dplab.desk import course
from dplab.desk.edits import source_of

EVERY_PART = """\
What holds for every part, unless its stub says otherwise:
  shape     A flat tensor has one dimension. The caller pads it with zeros to N equal chunks
            (`pack`), and a part may fail on one that N does not divide. A part that takes
            parameters pads and cuts by itself.
  chunks    Rank r of a group of N ranks owns chunk r: elements [r n/N, (r+1) n/N) of n.
  dtypes    A result has its input's dtype. Tensors that are packed together have one dtype.
  ranks     Ranks are those of the group. `group=None` means all ranks.
  calls     Every rank of the group makes the same calls, in the same order, with tensors of the
            same sizes and dtypes.
  inputs    A part leaves its inputs as they are. A result has memory of its own, on one rank as
            well.
  blocking  A part returns when its result is there. It starts no thread.
  backend   gloo, on CPUs.
  earlier   A part calls earlier parts by their names. In a notebook, one cell before it binds them:
            `ring_all_gather = dplab.mine("ring-all-gather")`. So the names travel to the ranks with
            the function that uses them.
"""


@dataclass(frozen=True)
class Part:
    """One row. ``by``: who writes it, the "reader", or the "course", which shows it."""

    slug: str
    chapter: course.Key
    by: str
    solution: Callable

    @property
    def name(self) -> str:
        return self.solution.__name__

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The slugs of the parts that it calls, in the order of the table."""
        names = names_in(self.solution) - {self.name}
        return tuple(part.slug for part in PARTS if part.name in names)


def _part(slug: str, *, beside: str = "") -> Part:
    """The row of an exercise; or of what the course gives ``beside`` the answer to another one."""
    exercise = find(beside or slug)
    assert exercise is not None
    if not beside:
        return Part(slug, exercise.chapter, "reader", exercise.solution)
    given = vars(sys.modules[exercise.solution.__module__])[slug.replace("-", "_")]
    return Part(slug, exercise.chapter, "course", given)


PARTS = (
    _part("exchange"), _part("ring-reduce-scatter"), _part("ring-all-gather"),
    _part("ring-all-reduce", beside="ring-all-gather"), _part("ring-seconds"),
    _part("pack", beside="average-gradients"), _part("unpack", beside="average-gradients"),
    _part("broadcast-weights"), _part("average-gradients"), _part("train-by-hand"),
    _part("make-buckets"), _part("gradient-buckets"), _part("overlapped-gradients"),
    _part("predict-step"),
    _part("sharded-optimizer"), _part("scatter-gradients"), _part("zero-2"), _part("hidden-zero"),
    _part("gather-chunks"), _part("sharded-unit"), _part("shard-a-model"),
    _part("predict-sharded-step"),
    _part("own-collectives"),
)


def as_text() -> str:
    """What holds for every part, what each calls, and then each part's stub or given source."""
    width = max(len(part.slug) for part in PARTS)
    lines = [EVERY_PART, "The parts, by chapter, and the parts that they call:\n"]
    for part in PARTS:
        whose = {"reader": "yours", "course": "given"}[part.by]
        used = ", ".join(part.uses) or "torch alone"
        lines.append(f"  {part.chapter:02}  {whose}  {part.slug:{width}}  {used}")
    for part in PARTS:
        stub = course.stub_of(part.chapter, part.slug) if part.by == "reader" else None
        if stub or part.by == "course":  # the chapters may not be beside the package
            lines += ["", (stub or source_of(part.solution).text).rstrip()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_text())

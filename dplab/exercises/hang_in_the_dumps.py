"""Which call of which rank makes a job hang: the analysis of all ranks' flight recorders."""

import copy

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases


def find_hang(dumps, groups):
    def made(rank, group, number):
        return next(
            ((entry["profiling_name"], entry["input_sizes"]) for entry in dumps[rank]
             if (entry["process_group"][0], entry["collective_seq_id"]) == (group, number)), None)

    waits = {}
    for rank, entries in enumerate(dumps):
        for entry in entries:
            if not entry["retired"]:
                waits.setdefault(rank, (entry["process_group"][0], entry["collective_seq_id"]))
    for group, number in sorted(set(waits.values()), key=lambda call: (int(call[0]), call[1])):
        calls = {rank: made(rank, group, number) for rank in groups[group]}
        different = len({str(call) for call in calls.values() if call}) > 1
        missing = [rank for rank, call in calls.items() if call is None]
        if (different or missing) and all(rank not in waits for rank in missing):
            return group, number, calls
    return None


def entry(group, number, name, sizes, retired=True):
    return {"process_group": (group, {"0": "default_pg"}.get(group, "undefined")),
            "collective_seq_id": number, "profiling_name": f"gloo:{name}",
            "input_sizes": sizes, "retired": retired, "state": "scheduled",
            "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3245},
                       {"name": "train", "filename": "train.py", "line": 40 + number}]}


def dump(*calls, waits=1):
    """A rank's dump: of its calls (group, name, sizes) the last ones are in flight."""
    counts, entries = {}, []
    for place, (group, name, sizes) in enumerate(calls):
        counts[group] = counts.get(group, 0) + 1
        entries.append(entry(group, counts[group], name, sizes, place < len(calls) - waits))
    return entries


_SUM, _NORM, _LOSS = ("0", "all_reduce", [[40]]), ("0", "all_reduce", [[1]]), (
    "0", "all_reduce", [[2]])
_NODE_0, _NODE_1 = (("1", "all_gather", [[10]]), ("2", "all_gather", [[10]]))
_PAIR_0, _PAIR_1 = (("3", "all_reduce", [[10]]), ("4", "all_reduce", [[10]]))
_TENTH = ("10", "all_gather", [[10]])
ALL_OF_4 = {"0": [0, 1, 2, 3]}
NODES = {**ALL_OF_4, "1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}


def _healthy(node, pair, steps):
    return [call for _ in range(steps) for call in (node, pair, _LOSS)]


# What happened, by name: the dumps, the groups, and where the answer lies.
CASES = {
    "rank 2 computes for ever": (
        [dump(_SUM, _LOSS, _SUM), dump(_SUM, _LOSS, _SUM), dump(_SUM, _LOSS, waits=0),
         dump(_SUM, _LOSS, _SUM)], ALL_OF_4),
    "rank 2 has ended, and two calls are in flight": (
        [dump(_SUM, _LOSS, _SUM, _LOSS, waits=2), dump(_SUM, _LOSS, _SUM, _LOSS, waits=2),
         dump(_SUM, _LOSS, waits=0)], {"0": [0, 1, 2]}),
    "rank 1 leaves a sum out": (
        [dump(_SUM, _LOSS, _SUM), dump(_SUM, _LOSS, _LOSS), dump(_SUM, _LOSS, _SUM)],
        {"0": [0, 1, 2]}),
    "rank 0 sums what only it has": (
        [dump(_SUM, _NORM), dump(_SUM, _LOSS), dump(_SUM, _LOSS), dump(_SUM, _LOSS)], ALL_OF_4),
    "ranks differ, and a call that they share is in flight behind it": (
        [dump(_SUM, _NORM, _SUM, waits=2), dump(_SUM, _LOSS, _SUM, waits=2)], {"0": [0, 1]}),
    "rank 0 broadcasts, the others sum": (
        [dump(_SUM, ("0", "broadcast", [[40]])), dump(_SUM, _SUM)], {"0": [0, 1]}),
    "rank 3 is gone, and two groups wait": (
        [dump(*_healthy(_NODE_0, _PAIR_0, 2), _NODE_0, _PAIR_0, _LOSS),
         dump(*_healthy(_NODE_0, _PAIR_1, 2), _NODE_0, _PAIR_1),
         dump(*_healthy(_NODE_1, _PAIR_0, 2), _NODE_1),
         dump(*_healthy(_NODE_1, _PAIR_1, 2), waits=0)], NODES),
    "rank 1 has ended, and a chain waits": (
        [dump(*_healthy(_NODE_0, _PAIR_0, 3), _NODE_0),
         dump(*_healthy(_NODE_0, _PAIR_1, 3), waits=0),
         dump(*_healthy(_NODE_1, _PAIR_0, 3), _NODE_1, _PAIR_0),
         dump(*_healthy(_NODE_1, _PAIR_1, 3), _NODE_1, _PAIR_1)], NODES),
    "two hangs, in groups 2 and 10": (
        [dump(_NODE_1, _NODE_1), dump(_NODE_1, waits=0), dump(_TENTH, _TENTH),
         dump(_TENTH, waits=0)], {**ALL_OF_4, "2": [0, 1], "10": [2, 3]}),
    "rank 1 has ended, and the recorder has dropped the first calls": (
        [dump(*[_SUM, _LOSS] * 3, _SUM)[-3:], dump(*[_SUM, _LOSS] * 3, waits=0)[-3:]],
        {"0": [0, 1]}),
    "all ranks have made the call that waits": (
        [dump(_SUM, _LOSS), dump(_SUM, _LOSS, waits=0), dump(_SUM, _LOSS)], {"0": [0, 1, 2]}),
    "two groups are used in opposite orders": (
        [dump(_SUM, _NODE_0), dump(_SUM, _PAIR_0)], {"0": [0, 1], "1": [0, 1], "3": [0, 1]}),
    "all is well": ([dump(_SUM, _LOSS, waits=0)] * 2, {"0": [0, 1]}),
}


class HangInTheDumps(Calculation):
    number = "12.4"
    title = "The hang in the dumps"
    minutes = 25
    solution = staticmethod(find_hang)

    def trial(self, attempt):
        return of_cases(of_hang, [(name,) for name in CASES],
                        lambda name: attempt(*copy.deepcopy(CASES[name])))

    def expected(self, world_size):
        return of_cases(of_hang, [(name,) for name in CASES],
                        lambda name: find_hang(*copy.deepcopy(CASES[name])))

    hints = (
        "A rank waits in the first entry that is not retired. Collect for each waiting rank in "
        "which call it waits: its group and number. A call with this group and number is *one* "
        "call for all ranks of the group. What did each of them make of it?",
        "Two things make a call hang: ranks made different calls under the same number, or a rank "
        "has not made it. A rank that has not made it may be a victim too, which waits elsewhere. "
        "So look for a call whose missing ranks all wait nowhere. If no rank is missing, the call "
        "is only under way; and there may be no such call.",
        "`waits[rank] = (group, number)` of its first entry that is not retired. For each of these "
        "calls, `calls = {rank: (name, sizes) or None for rank in groups[group]}`. It is the cause "
        "if its calls differ, or if some are None and none of these ranks is in `waits`.",
    )
    slips = (
        Slip("You name a call that lacks a rank which only waits elsewhere, for somebody else. "
             "Follow it: the cause is the call whose missing ranks all wait nowhere.",
             {" and all(rank not in waits for rank in missing)": ""},
             {"all(rank not in": "any(rank not in"}),
        Slip("You see the calls that a rank has not made, and not those that ranks made "
             "differently. One number is one call: compare its names and sizes.",
             {"(different or missing)": "missing"}),
        Slip("You compare the names alone. Two all-reduces of different sizes are not one call.",
             {"str(call) for": "call[0] for"}),
        Slip("You see calls that differ, and not a call that a rank has never made.",
             {"(different or missing)": "different"}),
        Slip("You look for a number among all groups. Each group counts its own calls: a call is "
             "known by group *and* number.",
             {'(entry["process_group"][0], entry["collective_seq_id"]) == (group, number)':
              'entry["collective_seq_id"] == number'}),
        Slip("You name all ranks of the job. Those outside the group never make this call.",
             {"for rank in groups[group]}": "for rank in range(len(dumps))}"}),
        Slip("You name a call that all of its ranks have made, under one name and with one size. "
             "It is only under way: look for one that lacks a rank.",
             {"(different or missing) and ": ""}),
        Slip("You name a call wherever ranks wait. Where each call lacks a rank that waits in "
             "another one, they wait in a circle, and none of them is the first.",
             {"return None": "return (group, number, calls) if waits else None"},
             {"return None": "return next(((*call, {rank: made(rank, *call) "
              "for rank in groups[call[0]]}) for call in sorted(set(waits.values()))), None)"}),
        Slip("A group's number is a text, and as texts \"10\" comes before \"2\". Compare numbers.",
             {", key=lambda call: (int(call[0]), call[1]))": ")"}),
        Slip("You find a call by its place in the list. The recorder keeps the last calls alone, "
             "so a list need not begin with the first: use `collective_seq_id`.",
             {"in dumps[rank]": 'in [each for each in dumps[rank] if each["process_group"][0] == '
              "group][number - 1:number]",
              'if (entry["process_group"][0], entry["collective_seq_id"]) == (group, number)':
              "if True"}),
        Slip("You take the last call that is in flight. A rank may have launched several: the "
             "first of them is what the others wait behind.",
             {'waits.setdefault(rank, (entry["process_group"][0], entry["collective_seq_id"]))':
              'waits[rank] = entry["process_group"][0], entry["collective_seq_id"]'}),
        Slip("You begin with the last call that all ranks have made. Where an earlier one is in "
             "flight too, and ranks made it differently, the hang began there.",
             {"sorted(set(waits.values())": "sorted({call for call in waits.values() if "
              "call[1] >= min(max((entry['collective_seq_id'] for entry in dumps[rank] "
              "if entry['process_group'][0] == call[0]), default=0) for rank in groups[call[0]])}"
              }),
        Slip("You take complete calls for those that hang. A call that hangs is not retired.",
             {'if not entry["retired"]': 'if entry["retired"]'}),
    )


def of_hang(case, answer):
    [name] = case
    group, number, calls = answer if isinstance(answer, tuple | list) and len(answer) == 3 else (
        answer, None, None)
    ranks = sorted(CASES[name][1]["0"])
    facts = {f"the group that hangs ({name})": group,
             f"the number of the call that hangs ({name})": number}
    for rank in ranks:
        found = calls.get(rank, "not in the group") if isinstance(calls, dict) else None
        facts[f"rank {rank}'s call there ({name})"] = (
            f"{found[0]} {found[1]}" if isinstance(found, tuple | list) and len(found) == 2
            else str(found))
    return facts

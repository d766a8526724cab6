"""Whole matrices from rows that are divided among the ranks: to an owner, and back."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog, sent_bytes


def orthogonalize_by_owners(shards, shapes, owners, orthogonalize):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = {index: shards[index].new_empty(shapes[index])
             for index, owner in enumerate(owners) if owner == rank}
    under_way = []
    for index, owner in enumerate(owners):
        if owner == rank:
            for source, rows in enumerate(whole[index].chunk(ranks)):
                if source == rank:
                    rows.copy_(shards[index])
                else:
                    under_way.append(dist.irecv(rows, source))
        elif len(shards[index]) > 0:
            under_way.append(dist.isend(shards[index], owner))
    for work in under_way:
        work.wait()
    updates = {index: orthogonalize(matrix) for index, matrix in whole.items()}
    results = [torch.empty_like(shard) for shard in shards]
    under_way = []
    for index, owner in enumerate(owners):
        if owner == rank:
            for to, rows in enumerate(updates[index].chunk(ranks)):
                if to == rank:
                    results[index].copy_(rows)
                else:
                    under_way.append(dist.isend(rows, to))
        elif len(results[index]) > 0:
            under_way.append(dist.irecv(results[index], owner))
    for work in under_way:
        work.wait()
    return results


# The last: on three and four ranks, the last rank has no row of it.
SHAPES = ((7, 5), (6, 12), (12, 3), (5, 6), (2, 9))


def owners_on(ranks):
    """Rank 0 owns the most, and where there are enough ranks, one owns nothing."""
    return [index * index % ranks for index in range(len(SHAPES))]


def made_nearly_orthogonal(matrix):
    """One step of Newton and Schulz: no row of it can be had from that row alone."""
    matrix = matrix / matrix.norm()
    return 1.5 * matrix - 0.5 * matrix @ (matrix.T @ matrix)


START = "rank, ranks = dist.get_rank(), dist.get_world_size()"
RESULTS = "results = [torch.empty_like(shard) for shard in shards]"
EVERYWHERE = """results = []
for shard, shape in zip(shards, shapes):
    every = list(shard.new_empty(shape).chunk(ranks))
    every += [shard.new_empty(0, shape[1])] * (ranks - len(every))
    every[rank].copy_(shard)
    for source, rows in enumerate(every):
        dist.broadcast(rows, source)
    results.append(orthogonalize(torch.cat(every)).split([len(rows) for rows in every])[rank])
return results"""

ONE_BY_ONE = """results = [shard.clone() for shard in shards]
for result, shape, owner in zip(results, shapes, owners):
    if owner == rank:
        pieces = (matrix := result.new_empty(shape)).chunk(ranks)
        for source, rows in enumerate(pieces):
            rows.copy_(result) if source == rank else dist.recv(rows, source)
        for to, rows in enumerate(orthogonalize(matrix).chunk(ranks)):
            result.copy_(rows) if to == rank else dist.send(rows, to)
    elif len(result) > 0:
        dist.send(result, owner)
        dist.recv(result, owner)
return results"""


class OrthogonalizeByOwners(Exercise):
    number = "D.2"
    title = "Rows to the owner, and back"
    minutes = 20
    solution = staticmethod(orthogonalize_by_owners)
    too_long = ("What is received into has another size in bytes than the message. There are three "
                "causes. The dtype: not all shards are float32, and `shard.new_empty(...)` has the "
                "shard's. The cut: ranks have the rows that `chunk` gives, and other ways to cut "
                "give others. The order: messages between two ranks match in the order in which "
                "they are sent and asked for.")

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        shards = [shards_of(matrix, ranks)[rank] for matrix in matrices()]
        before, owners = [shard.clone() for shard in shards], owners_on(ranks)
        away = sum(shard.nbytes for shard, owner in zip(shards, owners, strict=True)
                   if owner != rank)
        seen, late = [], [0]

        def orthogonalize(matrix):
            seen.append(tuple(matrix.shape))
            late.append(away - sum(map(sent_bytes, log.calls)))
            return made_nearly_orthogonal(matrix)

        with CallLog() as log:
            results = attempt(shards, list(SHAPES), owners, orthogonalize)
        sent = sum(map(sent_bytes, log.calls)) / needed(rank, ranks)
        return facts_of([each.clone() for each in results], sorted(seen), max(late), sent,
                        all(map(torch.equal, shards, before)))

    def expected(self, world_size):
        late = AtMost(0, "a rank that computes before it has sent all its rows keeps the other "
                      "owners waiting, so that they compute one after another", exact=False)
        share = AtMost(1.5, "a row goes to its owner, and its update comes back", exact=False)
        owned = [sorted(shape for shape, owner in zip(SHAPES, owners_on(world_size), strict=True)
                        if owner == rank) for rank in range(world_size)]
        updates = [shards_of(made_nearly_orthogonal(matrix), world_size) for matrix in matrices()]
        return [facts_of([rows[rank] for rows in updates], owned[rank], late, share, True)
                for rank in range(world_size)]

    hints = (
        "Three parts: rows travel to owners, owners compute, rows travel back. `matrix.chunk(N)` "
        "gives views of the rows of each rank: what can you receive into?",
        "The owner makes an empty matrix of the whole shape, receives each other rank's rows into "
        "its chunk, and copies its own. Who has no row, sends and receives nothing. Which calls "
        "let a rank go on to the next matrix?",
        "Start all `dist.isend` and `dist.irecv`, in the order of the matrices, keep the handles, "
        "and wait for all. Then orthogonalize what you own. Then the same the other way round, "
        "into `torch.empty_like(shard)`.",
    )
    slips = (
        Slip("Each rank orthogonalizes its own rows. In the products every row meets all others, "
             "so somebody needs the whole matrix: its owner.",
             {START: f"{START}\nreturn [orthogonalize(shard) for shard in shards]"}),
        Slip("Every rank gets every matrix and orthogonalizes it, so all do the same work, and "
             "most of what they receive belongs to others. Rows go to the owner alone.",
             {START: f"{START}\n{EVERYWHERE}"}),
        Slip("You finish one matrix before the next begins: while its owner computes, the others "
             "wait for what comes back. Which messages need no result? Start those first.",
             {START: f"{START}\n{ONE_BY_ONE}"}),
        Slip("The owner's own rows are missing, in the whole matrix or in what it returns. Nobody "
             "sends them: copy them.", {"rows.copy_(shards[index])": "rows.zero_()"},
             {"results[index].copy_(rows)": "results[index].zero_()"}),
        Slip("Where a matrix has too few rows, `chunk` has no chunk for the last ranks. They have "
             "nothing to send and nothing to receive, and the owner expects nothing from them.",
             {"elif len(shards[index]) > 0:": "else:", "elif len(results[index]) > 0:": "else:"},
             {"elif len(results[index]) > 0:": "else:"}, {"elif len(shards[index]) > 0:": "else:"},
             hangs=True),
        Slip("What comes back is what was sent. Send the rows of the update.",
             {"in enumerate(updates[index]": "in enumerate(whole[index]"}),
        Slip("You write the updates into the shards that you were given. Return new tensors.",
             {RESULTS: "results = shards"}),
    )


def matrices():
    return [seeded(f"matrix {index}", *shape, dtype=torch.float64)
            for index, shape in enumerate(SHAPES)]


def shards_of(matrix, ranks):
    """Each rank's rows, as `fully_shard` cuts: those of the last ranks may be none."""
    rows = matrix.chunk(ranks)
    return [*rows, *[matrix[:0]] * (ranks - len(rows))]


def needed(rank, ranks):
    """The bytes that this rank has to send, to owners and as an owner; 1 where that is none."""
    nbytes = 0
    for matrix, owner in zip(matrices(), owners_on(ranks), strict=True):
        own = shards_of(matrix, ranks)[rank].nbytes
        nbytes += matrix.nbytes - own if owner == rank else own
    return max(1, nbytes)


def facts_of(results, seen, late, sent, unchanged):
    return {
        "the shapes that this rank orthogonalizes": seen,
        **{f"this rank's rows of the update of the {rows}×{columns} matrix": result
           for (rows, columns), result in zip(SHAPES, results, strict=True)},
        "the bytes of rows that this rank has yet to send to owners when it computes": late,
        "the bytes that this rank sends, as a multiple of what is needed": sent,
        "that `shards` are left unchanged": unchanged}

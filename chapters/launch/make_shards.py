"""Writes token shards for train.py from files of text, here Python's own standard library.

    python make_shards.py data

A token is a byte here. For a tokenizer of yours, put its numbers in place of `tokens_of`; a token
has two bytes in a shard, so that there may be 65,536 different ones.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import numpy


def tokens_of(path):
    return numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8).astype(numpy.uint16)


def write(folder, paths, shards):
    """``index.json`` names the shards and their tokens: what is missing or cut off is noticed."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = numpy.concatenate([tokens_of(path) for path in paths])
    index = {}
    for number, part in enumerate(numpy.array_split(tokens, shards)):
        name = f"shard-{number:04}.bin"
        part.tofile(folder / name)
        index[name] = len(part)
    (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")
    print(f"{len(tokens):,} tokens in {shards} shards in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=3)
    options = parser.parse_args()
    library = Path(sysconfig.get_paths()["stdlib"])
    write(options.folder, sorted(library.glob("*.py")), options.shards)

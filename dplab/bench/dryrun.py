"""A training step of large models on fake ranks: memory by category, traffic, and time taken."""

import os

import torch

from dplab import dryrun
from dplab.measure.memory import CATEGORIES
from dplab.predict.catalogue import MODELS

_COLUMNS = (*CATEGORIES, "peak")


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", default=["Llama-3 70B", "Llama-3.1 405B"],
                        choices=list(MODELS), metavar="MODEL",
                        help="default 'Llama-3 70B' 'Llama-3.1 405B'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024],
                        help="default 8 64 1024")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank (default 1)")
    parser.add_argument("--sequence", type=int, default=4096, help="default 4096")
    parser.add_argument("--few", action="store_true",
                        help="trace a few blocks and take the others to be like them")


def main(options):
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; fully_shard on every block, fp32 "
          f"shards gathered in bf16, AdamW; {options.batch} × {options.sequence} tokens a rank; "
          "GB at the peak of a rank")
    head = "".join(f"{column:>15}" for column in _COLUMNS)
    for name in options.models:
        for checkpointing in (False, True):
            print(f"\n{name}{', blocks checkpointed' if checkpointing else ''}\n{'ranks':>6}{head}"
                  f"{'sent, GB':>11}{'gathers':>9}{'reduces':>9}{'traced':>9}{'s':>7}{'MB':>6}")
            for ranks in options.ranks:
                found = dryrun.fully_shard(
                    MODELS[name], ranks, batch=options.batch, sequence=options.sequence,
                    checkpointing=checkpointing, full=not options.few)
                held = [*(found.at_peak[category] for category in CATEGORIES), found.peak]
                print(f"{ranks:6}{''.join(f'{nbytes / 1e9:15.3f}' for nbytes in held)}"
                      f"{found.sent_bytes / 1e9:11.1f}{found.count('all_gather'):9}"
                      f"{found.count('reduce_scatter'):9}{found.traced_blocks:5}/{found.blocks:<3}"
                      f"{found.seconds:7.1f}{found.process_bytes / 1e6:6.0f}")

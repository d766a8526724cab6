"""A training step of large models on fake ranks: memory by category, traffic, and time taken."""

import itertools

from dplab import dryrun
from dplab.bench.results import save
from dplab.measure.memory_timeline import CATEGORIES
from dplab.predict.catalogue import MODELS


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", default=["Llama-3 70B", "Llama-3.1 405B"],
                        choices=list(MODELS), metavar="MODEL",
                        help="default 'Llama-3 70B' 'Llama-3.1 405B'")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024], help="default 64 1024")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank (default 1)")
    parser.add_argument("--sequence", type=int, default=4096, help="default 4096")
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["on"],
                        help="of every block (default on)")
    parser.add_argument("--few", action="store_true",
                        help="trace a few blocks and take the others to be like them: seconds "
                             "instead of minutes")
    parser.add_argument("--save", action="store_true",
                        help="keep the results, which chapter 09 shows")


def main(options):
    print("fully_shard on every block, fp32 shards gathered in bf16, AdamW; "
          f"{options.batch} × {options.sequence} tokens a rank; GB at the peak of a rank")
    rows = []
    for name, checkpointing in itertools.product(options.models, options.checkpointing):
        print(f"\n{name}, blocks {'' if checkpointing == 'on' else 'not '}checkpointed\n"
              f"{'ranks':>6}{''.join(f'{column:>{_width(column)}}' for column in CATEGORIES)}"
              f"{'peak':>9}{'sent':>9}{'calls':>7}{'traced':>9}{'took':>8}{'in':>8}")
        for ranks in options.ranks:
            found = dryrun.fully_shard(
                MODELS[name], ranks, batch=options.batch, sequence=options.sequence,
                checkpointing=checkpointing == "on", full=not options.few)
            held = "".join(f"{found.at_peak[category] / 1e9:{_width(category)}.2f}"
                           for category in CATEGORIES)
            traced = f"{found.traced_blocks}/{found.blocks}"
            print(f"{ranks:6}{held}{found.peak / 1e9:9.2f}{found.sent_bytes / 1e9:9.1f}"
                  f"{found.count():7}{traced:>9}{found.seconds:6.1f} s"
                  f"{found.process_bytes / 1e6:5.0f} MB", flush=True)
            rows.append({
                "model": name, "ranks": ranks, "batch": options.batch,
                "sequence": options.sequence, "checkpointing": checkpointing == "on",
                "peak": found.peak, "collectives": found.count(), "blocks": found.traced_blocks,
                "seconds": round(found.seconds), "process_bytes": found.process_bytes})
    if options.save:
        save("dryrun", rows=rows)


def _width(column):
    return max(len(column), 7) + 2

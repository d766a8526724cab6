"""A training step of large models on fake ranks: memory by category, collectives, time taken.

fully_shard on every block, which is checkpointed; fp32 shards gathered in bf16, AdamW. All blocks
are traced, which takes minutes; chapter 10 traces a few.
"""

from dplab import dryrun
from dplab.bench.results import save
from dplab.predict.catalogue import MODELS

NAMES, RANKS, BATCH, SEQUENCE = ("Llama-3 70B", "Llama-3.1 405B"), (64, 1024), 1, 4096


def main():
    rows = []
    for name in NAMES:
        for ranks in RANKS:
            found = dryrun.fully_shard(MODELS[name], ranks, batch=BATCH, sequence=SEQUENCE,
                                       checkpointing=True, full=True)
            print(found, flush=True)
            rows.append({
                "model": name, "ranks": ranks, "batch": BATCH, "sequence": SEQUENCE,
                "checkpointing": True, "peak": found.peak, "collectives": found.count(),
                "blocks": found.traced_blocks, "seconds": round(found.seconds),
                "process_bytes": found.process_bytes})
    save("dryrun", rows=rows)


if __name__ == "__main__":
    main()

"""The first edition named an exercise by a number; here is the slug that each has since."""

SLUGS = {
    "0.1": "global-mean", "1.1": "local-part", "1.2": "tensor-parallel-sum",
    "1.3": "accumulate-gradients", "2.1": "average-unequal-parts", "2.2": "token-loss",
    "2.3": "contrastive-loss", "3.1": "ring-reduce-scatter", "3.2": "ring-all-reduce",
    "3.3": "predict-all-reduce", "4.1": "broadcast-weights", "4.2": "average-gradients",
    "4.3": "train-by-hand", "4.4": "spot-the-bug", "5.1": "gradient-buckets",
    "5.2": "overlapped-gradients", "5.3": "exposed-communication", "6.1": "communication-ratio",
    "6.2": "accumulate-then-send", "6.3": "sparse-average", "7.1": "seeds-of-ranks",
    "7.2": "batch-norm-over-ranks", "7.3": "noise-scale", "7.4": "diloco-outer-step",
    "8.1": "bytes-per-rank", "8.2": "sharded-optimizer", "8.3": "scatter-gradients",
    "9.1": "forward-of-shards", "9.2": "clip-by-global-norm", "9.3": "choose-units",
    "10.1": "choose-strategy", "10.2": "hierarchical-all-reduce",
    "10.3": "checkpoint-that-survives", "10.4": "checkpoint-interval",
}

"""One step of DDP on two A100s, recorded by others: a lens on GPUs where there is none.

The profiler's trace of rank 0 lies in Holistic Trace Analysis, under the MIT licence (copyright
Meta Platforms). This takes from it the second of its three steps whole, and the all-reduces of all
three. HTA's own test calls it a ResNet, and the numbers of elements are those of ResNet-50.
"""

import gzip
import json
import sys
import urllib.request
from pathlib import Path

from dplab.bench.results import save

COMMIT = "f4d0062"
PATH = "tests/data/nccl_parser_config/nccl_data.json.gz"
SOURCE = f"https://github.com/facebookresearch/HolisticTraceAnalysis/blob/{COMMIT}/{PATH}"
RAW = f"https://raw.githubusercontent.com/facebookresearch/HolisticTraceAnalysis/{COMMIT}/{PATH}"
WHOLE = 1  # the place of the step that is kept whole
ON_GPU = "kernel", "gpu_memcpy", "gpu_memset"
PHASES = {"Optimizer.zero_grad#SGD.zero_grad": "zero_grad",
          "DistributedDataParallel.forward": "forward", "## backward ##": "backward",
          "Optimizer.step#SGD.step": "optimizer"}


def main(file=None):
    """file: a copy of the trace; without one it is downloaded."""
    packed = Path(file).read_bytes() if file else urllib.request.urlopen(RAW, timeout=60).read()
    trace = json.loads(gzip.decompress(packed))
    events = sorted((event for event in trace["traceEvents"] if event["ph"] == "X"),
                    key=lambda event: event["ts"])
    launched = {event["args"]["correlation"]: event["ts"] for event in events
                if event["cat"] == "cuda_runtime" and "correlation" in event["args"]}
    on_gpu = [event | {"launched": launched[event["args"]["correlation"]]} for event in events
              if event["cat"] in ON_GPU]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    whole = steps[WHOLE]
    parts = {
        "torch": f"not in the trace; NCCL {trace['distributedInfo']['nccl_version']}",
        "source": SOURCE, "licence": "MIT",
        "gpu": trace["deviceProperties"][0]["name"],
        "ranks": trace["distributedInfo"]["world_size"],
        "recorded": "2024-05-22", "parameters": resnet50(), "step_us": whole["dur"],
        "columns": "µs from the step's start: launched, start, duration; operation and elements",
        "collectives": [[collective(event, step) for event in on_gpu
                         if of_step(event, step) and "Collective name" in event["args"]]
                        for step in steps],
        "cpu": phases(events, whole),
        "kernels": [times(event, whole) for event in on_gpu
                    if of_step(event, whole) and "Collective name" not in event["args"]],
    }
    save("gpu_step", **parts)


def of_step(event, step):
    return step["ts"] <= event["launched"] < step["ts"] + step["dur"]


def times(event, step):
    return [round(each, 1) for each in (event["launched"] - step["ts"], event["ts"] - step["ts"],
                                        event["dur"])]


def collective(event, step):
    return [*times(event, step), event["args"]["Collective name"], event["args"]["In msg nelems"]]


def phases(events, step):
    """What the main thread does: name, start, end. Before forward, DDP broadcasts the buffers."""
    inside = [event for event in events if step["ts"] <= event["ts"] < step["ts"] + step["dur"]]
    found = {PHASES[event["name"]]: [round(event["ts"] - step["ts"], 1),
                                     round(event["ts"] + event["dur"] - step["ts"], 1)]
             for event in inside if event["cat"] == "user_annotation" and event["name"] in PHASES}
    first = next(event["ts"] - step["ts"] for event in inside if event["name"] == "aten::conv2d")
    found["buffers"] = [found["forward"][0], round(first, 1)]
    found["forward"][0] = round(first, 1)
    return [[name, *found[name]] for name in ("zero_grad", "buffers", "forward", "backward",
                                              "optimizer")]


def resnet50():
    """The elements of each parameter, in the order of torchvision's model."""
    def convolution(inputs, outputs, width):
        return [inputs * outputs * width * width, outputs, outputs]  # and its norm's two

    found, inputs = convolution(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += convolution(inputs, width, 1) + convolution(width, width, 3)
            found += convolution(width, 4 * width, 1)
            if block == 0:
                found += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*found, 2048 * 1000, 1000]


if __name__ == "__main__":
    main(*sys.argv[1:])

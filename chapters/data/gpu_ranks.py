"""DDP under NCCL, recorded on every rank and on one clock: GPT-2 in bf16, on GPUs.

    torchrun --nproc-per-node 2 chapters/data/gpu_ranks.py          a GPU for each rank
    torchrun --nproc-per-node 2 chapters/data/gpu_ranks.py --share  one GPU for all of them

With ``--share`` each rank tells NCCL that it is on a host of its own. So NCCL lets them share a
GPU, and sends over TCP. The file in the repository was recorded so, under NVIDIA's MPS, with
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50: each rank had half of the GPU's multiprocessors.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_step import ON_GPU
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import record_function

from dplab.bench.results import save
from dplab.predict.catalogue import MODELS
from dplab.workloads.transformer import Transformer

SEQUENCE = 1024
BATCHES = {"4": (4, 4), "16": (16, 16), "32": (32, 32), "16 and 24": (16, 24)}
"""Samples of a step, on an even and on an odd rank."""
CAPS = 1, 5, 25, 100, 1000  # MiB
SIZES = [2**power for power in range(12, 29, 2)]  # bytes
PHASES = "zero_grad", "forward", "backward", "optimizer"
GAP = 20  # µs: kernels of a phase that lie closer are written down as one


def ddp(cap=None):
    torch.manual_seed(0)
    model = Transformer(MODELS["GPT-2"]).to(torch.cuda.current_device(), torch.bfloat16)
    model = DDP(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def one_step(model, optimizer, x, mark=lambda name: None):
    """A step; its phases are named in the trace. ``mark`` is called after forward and backward."""
    with record_function("zero_grad"):
        optimizer.zero_grad()
    with record_function("forward"):
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
    mark("forward")
    with record_function("backward"):
        loss.backward()
    mark("backward")
    with record_function("optimizer"):
        optimizer.step()


def timed(call, rounds=9, warm_up=2):
    """Seconds of each call on this rank: all ranks begin at a barrier, and wait for the GPU."""
    found = []
    for _ in range(warm_up + rounds):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return [round(seconds, 6) for seconds in found[warm_up:]]


def ready_times(model, optimizer, x):
    """Seconds on the GPU's clock, of a step that sends nothing, until each gradient is there."""
    events = {}

    def mark(name):
        events[name] = torch.cuda.Event(enable_timing=True)
        events[name].record()

    hooks = [parameter.register_post_accumulate_grad_hook(lambda _, place=place: mark(place))
             for place, parameter in enumerate(model.parameters())]
    dist.barrier()
    torch.cuda.synchronize()
    mark("begin")
    with model.no_sync():
        one_step(model, optimizer, x, mark)
    mark("end")
    torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    after = {name: round(1e-3 * events["begin"].elapsed_time(event), 6)
             for name, event in events.items() if name != "begin"}
    return {name: after.pop(name) for name in ("forward", "backward", "end")} | {
        "ready": [after[place] for place in sorted(after)]}


def profiled(step):
    """The profiler's events of one step, in µs of the machine's clock."""
    with torch.profiler.profile() as profiler:
        dist.barrier()
        torch.cuda.synchronize()
        with record_function("step"):
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = [event | {"ts": event["ts"] + base, "args": event.get("args", {})}
              for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    return sorted(events, key=lambda event: event["ts"])


def in_short(events):
    """What the CPU, the compute stream and NCCL do in a step: name, start and duration in µs.

    Each kernel has the phase that launched it. ``zero`` is the step's start on the machine's clock.
    """
    [step] = [event for event in events
              if (event["name"], event["cat"]) == ("step", "user_annotation")]
    zero = step["ts"]
    launched = {event["args"]["correlation"]: event["ts"] - zero for event in events
                if event["cat"] in ("cuda_runtime", "cuda_driver")}
    cpu = [[event["name"], event["ts"] - zero, event["dur"]] for event in events
           if event["cat"] == "user_annotation" and event["name"] in PHASES]
    runs, collectives, queued = [], [], []
    for event in events:
        if event["cat"] not in ON_GPU or launched.get(event["args"]["correlation"], -1) < 0:
            continue
        at, start, end = (launched[event["args"]["correlation"]], event["ts"] - zero,
                          event["ts"] + event["dur"] - zero)
        if "nccl" in event["name"]:
            collectives.append([event["args"]["Collective name"], start, event["dur"], at,
                                event["args"]["In msg nelems"]])
            continue
        queued.append(start - at)
        # Backward's kernels are launched by a thread of autograd's: the phase is that of the time.
        phase = next((name for name, begin, seconds in cpu if begin <= at <= begin + seconds), "")
        if runs and runs[-1][0] == phase and start - runs[-1][2] < GAP:
            runs[-1][2] = max(end, runs[-1][2])
        else:
            runs.append([phase, start, end])
    return {"zero": zero, "step": step["dur"], "cpu": cpu, "kernels": len(queued),
            "queued": statistics.median(queued), "collectives": collectives,
            "compute": [[name, start, end - start] for name, start, end in runs]}


def rounded(found):
    if isinstance(found, dict):
        return {name: rounded(part) for name, part in found.items()}
    if isinstance(found, list):
        return [rounded(part) for part in found]
    return round(found, 1) if isinstance(found, float) else found


def recorded_steps(model, optimizer, x):
    """Seconds of steps with and without sending, when each gradient is there, and a trace."""
    def step():
        one_step(model, optimizer, x)

    def alone():
        with model.no_sync():
            step()

    return {"seconds": timed(step), "without_sending": timed(alone),
            **ready_times(model, optimizer, x),
            "trace": rounded(in_short([profiled(step) for _ in range(2)][-1]))}


def samples(count):
    return torch.randint(50_000, (count, SEQUENCE), device="cuda")


def measure():
    rank, found = dist.get_rank(), {"all_reduce": {}, "caps": {}, "steps": {}}
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        found["all_reduce"][nbytes] = timed(partial(dist.all_reduce, tensor))
    model, optimizer = ddp()
    found["parameters"] = [[name, parameter.numel()]
                           for name, parameter in model.module.named_parameters()]
    for name, batches in BATCHES.items():
        found["steps"][name] = recorded_steps(model, optimizer, samples(batches[rank % 2]))
    for cap in CAPS:
        model, optimizer = ddp(cap)
        found["caps"][cap] = timed(partial(one_step, model, optimizer, samples(16)), warm_up=3)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", action="store_true", help="one GPU for all ranks")
    options = parser.parse_args()
    if options.share:
        os.environ |= {"NCCL_HOSTID": f"rank {os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo",
                       "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", 0 if options.share else int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measure())
    if dist.get_rank() == 0:
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") if options.share else None
        command = "python -m torch.distributed.run --nproc-per-node 2 chapters/data/gpu_ranks.py"
        save("gpu_ranks", command=command + " --share" * options.share,
             nccl=".".join(map(str, torch.cuda.nccl.version())),
             gpu=torch.cuda.get_device_name(), percent_of_it=share and int(share),
             parameters=ranks[0].pop("parameters"), ranks=ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Rates of kernels on this GPU, and a real block's time and memory beside the prediction."""

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab import dryrun
from dplab.bench.results import FOLDER, save
from dplab.predict import kernels
from dplab.predict.catalogue import GPUS, MODELS, Gpu
from dplab.predict.pace import PACES
from dplab.predict.rates import PUBLISHED, Rates
from dplab.workloads.transformer import Block, Transformer, rotated, rotation_table

LEAST = 0.2  # seconds of each measurement, at least
random = partial(torch.randn, dtype=torch.bfloat16)
BACKENDS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
COLUMNS = {
    "matmul": ("m", "n", "k", "TFLOP/s"),
    "attention": ("kernel", "direction", "head_dim", "causal", "sequence", "TFLOP/s"),
    "memory": ("operation", "kind", "elements", "bytes_per_element", "milliseconds", "GB/s"),
    "launch": ("kind", "microseconds"),
}


def add_arguments(parser):
    parser.add_argument("--model", default="Llama-3 8B", choices=list(MODELS), metavar="MODEL",
                        help="whose layers to multiply, besides GPT-2's, and whose block to run "
                             "(default 'Llama-3 8B')")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens (default 8192)")
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--save", action="store_true",
                        help="keep the rates as chapters/data/gpu_CARD.json, for "
                             "predict.rates.Rates")


def main(options):
    if not torch.cuda.is_available():
        sys.exit("This bench measures a CUDA GPU, and torch sees none here.")
    if options.save and not FOLDER.is_dir():
        sys.exit(f"--save writes into the course's repository, and there is no {FOLDER}")
    properties = torch.cuda.get_device_properties(0)
    found = measure(options, torch.device("cuda"), properties.name, properties.total_memory)
    if options.save:
        save(f"gpu_{re.sub(r'[^a-z0-9]+', '_', properties.name.lower())}",
             command="python -m dplab.bench gpu --save", **found)


def measure(options, device: torch.device, card: str, memory_bytes: float) -> dict:
    """Measures and prints all: what `main` saves."""
    model, tokens = MODELS[options.model], options.sequence
    print(f"{card}: rates in bf16", flush=True)
    shapes = layer_shapes(MODELS["GPT-2"], tokens) | layer_shapes(model, tokens)
    tables = measured_tables(card, device, shapes, tokens, model.d_model, model.vocabulary,
                             compiled=not options.eager)
    best = {unit: max(row[-1] for table in tables if table["columns"][-1] == unit
                      for row in table["rows"]) for unit in ("TFLOP/s", "GB/s")}
    known = next((gpu for name, gpu in GPUS.items() if name in card), None) or Gpu(
        card, 1e12 * best["TFLOP/s"], memory_bytes, 1e9 * best["GB/s"])
    gpu = replace(known, name=card)
    peaks = {"TFLOP/s": gpu.bf16_flops / 1e12, "GB/s": gpu.memory_bandwidth / 1e9}
    for table in tables:
        print(f"\n{table['what']}: {', '.join(table['columns'])}")
        for row in table["rows"]:
            print("  " + ", ".join(map(str, row)))
        if table["columns"][-1] in peaks:
            table["peak"] = peaks[table["columns"][-1]]

    attention = attention_kernel(model, tokens, device)
    print(f"\nA block of {options.model}, {tokens} tokens, forward and backward in ms: measured; "
          f"predicted from these rates; from published ones, {', '.join(PACES)}\n"
          f"torch takes {attention} for attention")
    blocks = []
    for compiled in (False,) if options.eager else (False, True):
        predicted = partial(kernels.seconds, block_kernels(model, tokens, compiled),
                            compiled=compiled, attention=attention)
        row = {"measured": block_seconds(model, tokens, device, compiled=compiled),
               "own": predicted(gpu, rates=Rates(tables)),
               **{pace: predicted(known, rates=PUBLISHED, pace=pace) for pace in PACES}}
        print(f"  {'compiled' if compiled else 'eager':9}" + "".join(
            f"{1e3 * seconds:9.2f}" for seconds in row.values()), flush=True)
        blocks.append({"compiled": compiled, "attention": attention, **row})
    found = {"gpu": card, "peaks": peaks, "tables": tables, "blocks": blocks}
    if device.type == "cuda":
        two = replace(model, layers=2, vocabulary=min(model.vocabulary, 32_000))
        peak = dplab.run(ddp_peak, 1, two, tokens)[0]
        dry = dryrun.ddp(two, 1, batch=1, sequence=tokens, precision="bf16").peak
        print(f"\nA step of two such blocks under DDP, all in bf16: {peak / 1e9:.2f} GB at the "
              f"peak, the dry run says {dry / 1e9:.2f}")
        found["memory"] = {"measured": peak, "dry_run": dry}
    return found


def block_kernels(model, tokens: int, compiled: bool = False) -> list[kernels.Kernel]:
    return [*kernels.block_forward(model, 1, tokens, compiled=compiled),
            *kernels.block_backward(model, 1, tokens, compiled=compiled)]


def layer_shapes(model, tokens: int) -> dict[tuple[int, ...], None]:
    """The products of a model's block, forward and backward, as (m, n, k), each once."""
    every = block_kernels(model, min(tokens, model.context))
    return dict.fromkeys(kernel.shape for kernel in every if kernel.what == "matmul")


def seconds_of(call: Callable) -> float:
    """The median of ten rounds of calls one after another, for `LEAST` seconds, after three."""
    for _ in range(3):
        call()
    calls = 1
    while round_seconds(call, calls) < LEAST / 10:
        calls *= 2
    return statistics.median(round_seconds(call, calls) for _ in range(10)) / calls


def round_seconds(call: Callable, calls: int) -> float:
    """From the first call to the end of the last one's kernels."""
    finish_kernels()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    finish_kernels()
    return time.perf_counter() - begun


def finish_kernels() -> None:
    """Waits for the GPU; without one, a call's work is done when it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def short(value: float) -> float:
    """With five digits."""
    return float(f"{value:.5g}")


def measured_tables(card: str, device: torch.device, shapes, tokens: int, width: int,
                    vocabulary: int, *, compiled: bool = True) -> list[dict]:
    """All rates, in the tables of ``kernels.json``, with ``card`` as each table's GPU."""
    one_kernel = partial(torch.zeros(1, device=device).add_, 1)
    rows = {
        "matmul": matmul_rows(shapes, device),
        "attention": attention_rows(tokens, device),
        "memory": memory_rows(tokens, width, vocabulary, device, compiled=compiled),
        "launch": [["from Python", short(1e6 * seconds_of(one_kernel))]],
    }
    return [{"what": what, "gpu": card, "source": "python -m dplab.bench gpu",
             "columns": COLUMNS[what], "rows": rows[what]} for what in rows]


def matmul_rows(shapes, device):
    rows = []
    for m, n, k in shapes:
        product = partial(torch.matmul, random(m, k, device=device), random(k, n, device=device))
        rows.append([m, n, k, short(2 * m * n * k / seconds_of(product) / 1e12)])
    return rows


def attention_rows(tokens, device, width=2048):
    rows = []
    for kernel, backend in BACKENDS.items():
        for head_dim in (64, 128):
            for sequence in (tokens // 4, tokens):
                shape = tokens // sequence, width // head_dim, sequence, head_dim
                flops = 4 * tokens * sequence * width / 2  # the mask leaves a half
                try:
                    forward, backward = attention_seconds(backend, shape, device)
                except RuntimeError as error:  # no such kernel for this card or shape
                    print(f"no {kernel} for {shape} here: {str(error).partition(chr(10))[0]}")
                    continue
                rows += [[kernel, direction, head_dim, True, sequence, short(work / took / 1e12)]
                         for direction, work, took in (("forward", flops, forward),
                                                       ("backward", 2.5 * flops, backward))]
    return rows


def attention_seconds(backend, shape, device):
    """Of forward and of backward. RuntimeError where there is no such kernel."""
    *inputs, gradient = (random(*shape, device=device, requires_grad=True) for _ in range(4))
    with sdpa_kernel(backend):
        forward = partial(F.scaled_dot_product_attention, *inputs, is_causal=True)
        return seconds_of(forward), seconds_of(partial(
            torch.autograd.grad, forward(), inputs, gradient, retain_graph=True))


def memory_rows(tokens, width, vocabulary, device, *, compiled=True):
    """Each operation with its bytes an element counted as in `kernels.block_forward`."""
    new = partial(random, device=device)
    x, y, out, scale = new(tokens, width), new(tokens, width), new(tokens, width), new(width)
    head_dim = min(width, 128)
    heads = new(1, tokens, width // head_dim, head_dim)
    table = rotation_table(tokens, head_dim, device, torch.bfloat16)
    weight, places = new(vocabulary, width), torch.randint(vocabulary, (tokens,), device=device)
    logits = new(tokens // 8, vocabulary)  # those of all tokens would fill a small card
    parameter = nn.Parameter(torch.zeros(tokens, width, device=device))
    parameter.grad = torch.ones_like(parameter)

    def norm(values, scale):
        return F.rms_norm(values, (width,), scale, 1e-5)

    def loss(values):
        return F.cross_entropy(values.float(), places[:len(values)])

    def optimizer(**options):
        step = torch.optim.AdamW([parameter], **options).step
        return lambda parameter: step()

    # Operation, kind, bytes of forward and of backward for an element of the first input.
    operations: list[tuple] = [
        ("copy", "eager", 4, 0, out.copy_, x),
        ("elementwise", "eager", 6, 0, torch.add, x, y),
        ("activation", "eager", 4, 0, F.silu, x),
        ("activation", "eager", 6, 0, torch.mul, x, y),
        ("rotary", "eager", 18, 0, rotated, heads, table),
        ("embedding", "eager", 4, 0, lambda x: F.embedding(places, weight), x),
        ("norm", "eager", 4, 10, norm, x, scale),
        ("loss", "eager", 16, 20, loss, logits.float()),
        ("optimizer", "fused", 28, 0, optimizer(fused=True), parameter),
        ("optimizer", "foreach", 28, 0, optimizer(foreach=True), parameter),
    ]
    if compiled:
        operations += [
            (operation, "compiled", forward, backward, torch.compile(function), *inputs)
            for operation, forward, backward, function, *inputs in (
                ("elementwise", 6, 0, torch.add, x, y),
                ("activation", 6, 0, lambda a, b: F.silu(a) * b, x, y),
                ("rotary", 4, 0, rotated, heads, table),
                ("norm", 6, 8, lambda a, b, scale: norm(a + b, scale), x, y, scale),
                ("loss", 2, 4, loss, logits))]
    rows = []

    def add(operation, kind, elements, nbytes, call):
        took = seconds_of(call)
        rows.append([operation, kind, elements, nbytes, short(1e3 * took),
                     short(elements * nbytes / took / 1e9)])

    for operation, kind, forward, backward, function, *inputs in operations:
        elements = inputs[0].numel()
        if backward:
            inputs = [each.detach().requires_grad_() for each in inputs]
        add(operation, kind, elements, forward, partial(function, *inputs))
        if backward:
            result = function(*inputs)
            add(f"{operation} backward", kind, elements, backward, partial(
                torch.autograd.grad, result, inputs, torch.ones_like(result), retain_graph=True))
    return rows


def block_seconds(model, tokens: int, device: torch.device, *, compiled: bool = False) -> float:
    """The course's block of this model in bf16: forward and backward."""
    block = Block(model).to(device, torch.bfloat16)
    x = random(1, tokens, model.d_model, device=device, requires_grad=True)
    rotation = None if model.learned_positions else rotation_table(
        tokens, model.d_model // model.heads, device, torch.bfloat16)
    run, gradient = torch.compile(block) if compiled else block, torch.ones_like(x)

    def step():
        block.zero_grad()
        run(x, rotation).backward(gradient)

    return seconds_of(step)


def ddp_peak(model, tokens: int) -> int:
    """Bytes at the peak of a training step on this rank's GPU."""
    replica = DistributedDataParallel(Transformer(model).to(dplab.device(), torch.bfloat16))
    optimizer = torch.optim.AdamW(replica.parameters(), fused=True)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=dplab.device())
    for _ in range(3):  # the buckets and the optimizer's state are there from the second step on
        torch.cuda.reset_peak_memory_stats()
        logits = replica(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def attention_kernel(model, tokens: int, device: torch.device) -> str:
    """The kernel that torch takes for this model's attention, one of BACKENDS if it can."""
    query = random(1, model.heads, tokens, model.d_model // model.heads, device=device)
    taken = torch._fused_sdp_choice(query, query, query, is_causal=True)
    return next((name for name, backend in BACKENDS.items() if backend.value == taken),
                next(iter(BACKENDS)))

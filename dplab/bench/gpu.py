"""Rates of kernels on this GPU, and a real block's time and memory beside the prediction."""

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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

BACKENDS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
COLUMNS = {
    "matmul": ("m", "n", "k", "TFLOP/s"),
    "attention": ("kernel", "direction", "head_dim", "causal", "sequence", "TFLOP/s"),
    "memory": ("operation", "kind", "elements", "bytes_per_element", "milliseconds", "GB/s"),
    "launch": ("kind", "microseconds"),
}


def add_arguments(parser):
    parser.add_argument("--models", nargs="+", default=["GPT-2", "Llama-3 8B"],
                        choices=list(MODELS), metavar="MODEL",
                        help="whose layers to multiply (default GPT-2 'Llama-3 8B')")
    parser.add_argument("--block", default="Llama-3 8B", choices=list(MODELS), metavar="MODEL",
                        help="whose block to run (default 'Llama-3 8B')")
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
    card = torch.cuda.get_device_name()
    found = measure(options, torch.device("cuda"), card,
                    torch.cuda.get_device_properties(0).total_memory)
    if options.save:
        save(f"gpu_{re.sub(r'[^a-z0-9]+', '_', card.lower())}", "python -m dplab.bench gpu --save",
             **found)


def measure(options, device: torch.device, card: str, memory_bytes: float) -> dict:
    """Measures and prints all; what `main` saves. A step's memory is measured on a GPU alone."""
    model = MODELS[options.block]
    print(f"{card}: rates in bf16, the median of 10 rounds", flush=True)
    tables = measured_tables(card, device, [MODELS[name] for name in options.models],
                             tokens=options.sequence, width=model.d_model,
                             vocabulary=model.vocabulary, compiled=not options.eager)
    flops, bandwidth = own_peaks(tables).values()
    known = in_catalogue(card) or Gpu(card, flops, memory_bytes, bandwidth)
    gpu = replace(known, name=card)
    peaks = {"TFLOP/s": gpu.bf16_flops / 1e12, "GB/s": gpu.memory_bandwidth / 1e9}
    for table in tables:
        print(f"\n{table['what']}: {', '.join(table['columns'])}")
        for row in table["rows"]:
            print("  " + ", ".join(str(value) for value in row))
        if table["columns"][-1] in peaks:
            table["peak"] = peaks[table["columns"][-1]]

    config = replace(model, layers=2, vocabulary=min(model.vocabulary, 32_000))
    print(f"\nA block of {options.block}, {options.sequence} tokens, forward and backward in ms: "
          f"measured; predicted from these rates; from published ones, {', '.join(PACES)}")
    blocks, attention = [], attention_kernel(config, options.sequence, device)
    print(f"torch takes {attention} for attention")
    for compiled in (False,) if options.eager else (False, True):
        row = {"compiled": compiled,
               "measured": block_seconds(config, 1, options.sequence, device, compiled=compiled),
               "attention": attention,
               "own": predicted(config, 1, options.sequence, gpu, compiled, attention,
                                Rates(tables)),
               **{pace: predicted(config, 1, options.sequence, known, compiled, attention,
                                  PUBLISHED, pace) for pace in PACES}}
        blocks.append(row)
        print(f"  {'compiled' if compiled else 'eager':9}" + "".join(
            f"{1e3 * row[column]:9.2f}" for column in ("measured", "own", *PACES)), flush=True)
    found = {"gpu": card, "peaks": peaks, "tables": tables, "blocks": blocks}
    if device.type == "cuda":
        peak, dry = memory_peaks(config, 1, options.sequence)
        print(f"\nA step of two such blocks under DDP, all in bf16: {peak / 1e9:.2f} GB at the "
              f"peak, the dry run says {dry / 1e9:.2f}")
        found["memory"] = {"measured": peak, "dry_run": dry}
    return found


def in_catalogue(card: str) -> Gpu | None:
    """The catalogue's GPU that the card's name contains."""
    return next((gpu for name, gpu in GPUS.items() if name in card), None)


def own_peaks(tables) -> dict[str, float]:
    """The highest rates measured, for a card whose peaks are not in the catalogue."""
    best = {unit: max(row[-1] for table in tables if table["columns"][-1] == unit
                      for row in table["rows"]) for unit in ("TFLOP/s", "GB/s")}
    return {"bf16_flops": 1e12 * best["TFLOP/s"], "memory_bandwidth": 1e9 * best["GB/s"]}


def seconds_of(function: Callable, device: torch.device, rounds: int = 10) -> float:
    """The median time of a call, after three; on a GPU that of its kernels."""
    for _ in range(3):
        function()
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            function()
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def measured_tables(gpu: str, device: torch.device, configs: Sequence, *, tokens: int = 8192,
                    width: int = 4096, vocabulary: int = 128_256, compiled: bool = True,
                    rounds: int = 10) -> list[dict]:
    """All rates, in the tables of ``kernels.json``, with ``gpu`` as each table's name of the card.
    """
    time_it = partial(seconds_of, device=device, rounds=rounds)
    rows = {
        "matmul": matmul_rows(configs, tokens, device, time_it),
        "attention": attention_rows(tokens, device, time_it),
        "memory": memory_rows(tokens, width, vocabulary, device, time_it, compiled=compiled),
        "launch": [["from Python", round(1e6 * _launch_seconds(device), 2)]],
    }
    return [{"what": what, "gpu": gpu, "source": "python -m dplab.bench gpu",
             "columns": COLUMNS[what], "rows": rows[what]} for what in rows]


def layer_shapes(config, tokens: int) -> list[tuple[int, ...]]:
    """The products of a model's block, forward and backward, as (m, n, k), each once."""
    every = [*kernels.block_forward(config, 1, tokens), *kernels.block_backward(config, 1, tokens)]
    return list(dict.fromkeys(kernel.shape for kernel in every if kernel.what == "matmul"))


def matmul_rows(configs, tokens, device, time_it):
    rows = []
    for m, n, k in dict.fromkeys(shape for config in configs
                                 for shape in layer_shapes(config, min(tokens, config.context))):
        left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16)
                       for shape in ((m, k), (k, n)))
        rows.append([m, n, k, round(2 * m * n * k / time_it(lambda a=left, b=right: a @ b) / 1e12,
                                    4)])
    return rows


def attention_rows(tokens, device, time_it, width=2048):
    rows = []
    for kernel, backend in BACKENDS.items():
        for head_dim in (64, 128):
            for sequence in dict.fromkeys((max(1, tokens // 4), tokens)):
                shape = (max(1, tokens // sequence), max(1, width // head_dim), sequence, head_dim)
                try:
                    rows += _attention(kernel, backend, shape, device, time_it)
                except RuntimeError as error:  # no such kernel for this card or shape
                    print(f"no {kernel} for {shape} here: {str(error).partition(chr(10))[0]}")
    return rows


def _attention(kernel, backend, shape, device, time_it):
    batch, heads, sequence, head_dim = shape
    query, key, value, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16,
                                               requires_grad=True) for _ in range(4))

    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    flops = 4 * batch * heads * sequence**2 * head_dim / 2
    output = forward()

    def backward():
        torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return [[kernel, direction, head_dim, True, sequence,
             round(work / time_it(function) / 1e12, 4)]
            for direction, function, work in (("forward", forward, flops),
                                              ("backward", backward, 2.5 * flops))]


def memory_rows(tokens, width, vocabulary, device, time_it, *, compiled=True):
    """Each operation with its bytes an element counted as in `kernels.block_forward`."""
    new = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, y, out = new(tokens, width), new(tokens, width), torch.empty(
        tokens, width, device=device, dtype=torch.bfloat16)
    scale = torch.ones(width, device=device, dtype=torch.bfloat16)
    heads = new(1, tokens, max(1, width // 128), min(width, 128))
    table = rotation_table(tokens, heads.shape[-1], device, torch.bfloat16)
    weight = new(vocabulary, width)
    places = torch.randint(vocabulary, (tokens,), device=device)
    some = max(1, tokens // 8)  # logits of all tokens would fill a small card
    logits = torch.randn(some, vocabulary, device=device)
    rows = []

    def add(operation, kind, elements, nbytes, function):
        took = time_it(function)
        rows.append([operation, kind, elements, nbytes, round(1e3 * took, 4),
                     round(elements * nbytes / took / 1e9, 2)])

    def with_backward(operation, kind, elements, forward_bytes, backward_bytes, function, *inputs):
        inputs = [each.detach().requires_grad_() for each in inputs]
        add(operation, kind, elements, forward_bytes, lambda: function(*inputs))
        result = function(*inputs)
        gradient = torch.ones_like(result)
        add(f"{operation} backward", kind, elements, backward_bytes,
            lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))

    def norm(values, scale):
        return F.rms_norm(values, (width,), scale, 1e-5)

    def loss(values):
        return F.cross_entropy(values, places[:some])

    add("copy", "eager", x.numel(), 4, lambda: out.copy_(x))
    add("elementwise", "eager", x.numel(), 6, lambda: x + y)
    add("activation", "eager", x.numel(), 4, lambda: F.silu(x))
    add("activation", "eager", x.numel(), 6, lambda: x * y)
    add("rotary", "eager", heads.numel(), 18, lambda: rotated(heads, table))
    add("embedding", "eager", x.numel(), 4, lambda: F.embedding(places, weight))
    with_backward("norm", "eager", x.numel(), 4, 10, norm, x, scale)
    with_backward("loss", "eager", logits.numel(), 16, 20, loss, logits)
    if compiled:
        add("elementwise", "compiled", x.numel(), 6, partial(torch.compile(torch.add), x, y))
        add("activation", "compiled", x.numel(), 6,
            partial(torch.compile(lambda a, b: F.silu(a) * b), x, y))
        add("rotary", "compiled", heads.numel(), 4,
            partial(torch.compile(rotated), heads, table))
        with_backward("norm", "compiled", x.numel(), 6, 8,
                      torch.compile(lambda a, b, scale: norm(a + b, scale)), x, y, scale)
        with_backward("loss", "compiled", logits.numel(), 2, 4,
                      torch.compile(lambda values: loss(values.float())),
                      logits.to(torch.bfloat16))
    for kind, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        parameter = nn.Parameter(torch.zeros(tokens, width, device=device))
        parameter.grad = torch.ones_like(parameter)
        add("optimizer", kind, parameter.numel(), 28,
            torch.optim.AdamW([parameter], **options).step)
    return rows


def _launch_seconds(device, launches=1000):
    """Of many tiny kernels launched from Python, what each takes."""
    tiny = torch.zeros(1, device=device)

    def many():
        for _ in range(launches):
            tiny.add_(1)

    return seconds_of(many, device, rounds=3) / launches


def block_seconds(config, batch: int, sequence: int, device: torch.device, *,
                  compiled: bool = False, rounds: int = 10) -> float:
    """The course's block of this configuration in bf16: forward and backward."""
    torch.manual_seed(0)
    block = Block(config).to(device, torch.bfloat16)
    x = torch.randn(batch, sequence, config.d_model, device=device, dtype=torch.bfloat16,
                    requires_grad=True)
    rotation = None if config.learned_positions else rotation_table(
        sequence, config.d_model // config.heads, device, torch.bfloat16)
    run = torch.compile(block) if compiled else block
    gradient = torch.ones_like(x)

    def step():
        block.zero_grad()
        run(x, rotation).backward(gradient)

    return seconds_of(step, device, rounds)


def attention_kernel(config, sequence: int, device: torch.device) -> str:
    """The kernel that torch takes for this model's attention, one of BACKENDS if it can."""
    query, key, value = (torch.empty(1, config.heads, sequence, config.d_model // config.heads,
                                     device=device, dtype=torch.bfloat16) for _ in range(3))
    taken = torch._fused_sdp_choice(query, key, value, is_causal=True)
    return next((name for name, backend in BACKENDS.items() if backend.value == taken),
                next(iter(BACKENDS)))


def predicted(config, batch: int, sequence: int, gpu: Gpu, compiled: bool, attention: str,
              rates: Rates, pace: str = "typical") -> float:
    """Seconds of a block's forward and backward at those rates."""
    every = [*kernels.block_forward(config, batch, sequence, compiled=compiled),
             *kernels.block_backward(config, batch, sequence, compiled=compiled)]
    return kernels.seconds(every, gpu, compiled=compiled, attention=attention, pace=pace,
                           rates=rates)


def memory_peaks(config, batch: int, sequence: int) -> tuple[int, int]:
    """Bytes at the peak of a step under DDP on one GPU, all in bf16, and those of the dry run."""
    real = dplab.run(_ddp_peak, 1, config, batch, sequence)[0]
    return real, dryrun.ddp(config, 1, batch=batch, sequence=sequence, precision="bf16").peak


def _ddp_peak(config, batch, sequence):
    device = dplab.device()
    model = DistributedDataParallel(Transformer(config).to(device, torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device=device)
    for _ in range(3):  # the buckets and the optimizer's state are there from the second step on
        torch.cuda.reset_peak_memory_stats()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()

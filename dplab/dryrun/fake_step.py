"""The step itself, in a process of its own: as one rank of a group that sends nothing.

The model is made on the meta device and wrapped there, and its shards become fake tensors, as large
models are initialised in earnest. Then the optimizer's state is made, and one step is traced.
"""

import gc
import time
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dplab.dryrun.events import blocks_to_trace, lengthened, replay
from dplab.dryrun.findings import DryRun, UnsupportedOperator
from dplab.dryrun.instruments import FakeTensors, StepTimeline
from dplab.dryrun.setup import Setup
from dplab.dryrun.units import UnknownUnits, blocks_of, checkpointed, shard, units_of
from dplab.predict import shards
from dplab.predict.memory import States
from dplab.predict.transformer_config import TransformerConfig
from dplab.spawn.between.calls import is_learners
from dplab.workloads.transformer import Transformer

_VALUES_NEEDED = (fake_tensor.DataDependentOutputException,
                  fake_tensor.DynamicOutputShapeException,
                  fake_tensor.UnsupportedOperatorException)


def dry_run(setup: Setup) -> DryRun | Exception:
    """Runs the setup and returns its report, or the exception that the caller is to raise."""
    start = time.perf_counter()
    _use_fused_kernels()
    try:
        run = _few_blocks(setup) or Run(setup)
    except _VALUES_NEEDED as error:
        return UnsupportedOperator(_words(error))
    except UnknownUnits as error:
        return ValueError(str(error))
    samples, phases, collectives = replay(run.trace)
    after, parameters, blocks = samples[-1].bytes, run.parameters, len(run.blocks)
    if isinstance(setup.model, TransformerConfig):  # the run may have had a few of its blocks
        parameters, blocks = setup.model.parameters, setup.model.layers
    return DryRun(
        setup.strategy, setup.world_size, parameters,
        States(after["parameters"], after["gradients"], after["optimizer"]),
        samples, phases, collectives, blocks, len(run.blocks), time.perf_counter() - start)


def _few_blocks(setup):
    """The run of a model with fewer blocks, with the trace of all; None where that cannot be."""
    period = setup.units if isinstance(setup.units, int) else 1
    alike = setup.units == "blocks" or isinstance(setup.units, int | type)
    if setup.full or not alike or not isinstance(setup.model, TransformerConfig):
        return None
    blocks = setup.model.layers
    few = blocks_to_trace(blocks, period)
    if few == blocks:
        return None
    run = Run(replace(setup, model=replace(setup.model, layers=few)))
    run.trace = lengthened(run.trace, few, blocks, period)
    return run if run.trace else None


class Run:
    """One rank's model, optimizer and step; ``trace`` is that of a step in mid-training."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._memory: StepTimeline | None = None  # while the step is watched
        with torch.device("meta"):
            built = setup.model
            self._model = Transformer(built) if isinstance(built, TransformerConfig) else built()
            if setup.precision == "bf16":
                self._model.to(torch.bfloat16)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.blocks = blocks_of(self._model)
        _join(setup.world_size, self._fullest_rank())
        sharded = setup.strategy == "fully_shard"
        units = units_of(self._model, self.blocks, setup.units) if sharded else []
        if setup.checkpointing:
            self.blocks, units = checkpointed(self._model, self.blocks, units)
        if sharded:
            shard(self._model, units, setup)
        gc.collect()
        gc.disable()  # or cycles would be freed at any time, and no two steps would be alike
        try:
            with FakeTensors() as fake:
                _to_fake(self._model)
                model, optimizer = self._sharded() if sharded else self._replicated(fake)
                self._watch_blocks()
                self._memory = StepTimeline(model, optimizer, self.blocks)
                with self._memory:
                    self._step(model, optimizer)
        finally:
            gc.enable()
        self.trace = self._memory.trace()

    def _sharded(self):
        """The model under `fully_shard`, and its optimizer with state."""
        self._model._get_fsdp_state()._lazy_init()  # which else is a part of the first step
        optimizer = self._setup.optimizer(self._model.parameters())
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return self._model, optimizer

    def _replicated(self, fake):
        """The model under DDP, and its optimizer, after one step: only then are the buckets those
        of every later step.
        """
        model = DistributedDataParallel(
            self._model, init_sync=False,  # all ranks' are alike
            gradient_as_bucket_view=self._setup.bucket_views)
        model.register_comm_hook(None, _average)
        parameters = self._model.parameters()
        optimizer = (self._setup.optimizer(parameters) if self._setup.strategy == "DDP" else
                     ZeroRedundancyOptimizer(parameters, self._setup.optimizer))
        self._step(model, optimizer)
        optimizer.zero_grad()
        fake.integers_are_real = True
        model.reducer._rebuild_buckets()
        fake.integers_are_real = False
        return model, optimizer

    def _step(self, model, optimizer):
        arguments, targets = self._batch()
        self._begin("forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=self._setup.precision == "mixed"
                            and self._setup.strategy != "fully_shard"):
            output = model(*arguments)
            if targets is not None:
                loss = F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())
            else:
                loss = output.float().mean()
        del output
        self._begin("backward")
        loss.backward()
        self._begin("optimizer")
        optimizer.step()

    @torch.no_grad()
    def _batch(self):
        setup = self._setup
        if not isinstance(setup.model, TransformerConfig):
            arguments = setup.inputs()
            return arguments if isinstance(arguments, tuple) else (arguments,), None
        tokens = torch.zeros(setup.batch, setup.sequence or setup.model.context, dtype=torch.int64)
        return (tokens,), torch.zeros_like(tokens)

    def _fullest_rank(self):
        if self._setup.strategy != "ZeRO-1":
            return 0  # which has what does not divide
        shapes = [tuple(parameter.shape) or (1,) for parameter in self._model.parameters()
                  if parameter.requires_grad]
        states = shards.real_states("ZeroRedundancyOptimizer", "fp32", self._setup.world_size,
                                    [shapes])
        return max(range(len(states)), key=lambda rank: states[rank].optimizer)

    def _watch_blocks(self):
        for block, module in enumerate(self.blocks):
            module.register_forward_pre_hook(
                lambda *_, block=block: self._begin("forward", block))
            module.register_forward_hook(
                lambda module, inputs, output, block=block: self._watch_backward(output, block))

    def _watch_backward(self, output, block):
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda _: self._begin("backward", block))

    def _begin(self, phase, block=None):
        if self._memory is not None:
            self._memory.begin(phase, block)


def _join(world_size, rank):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def _to_fake(model):
    """Gives the parameters on the meta device fake memory; tied ones stay tied."""
    made = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                tensors[name] = made.get(tensor)


def _average(_, bucket):
    """What DDP's reducer does itself, which does not understand the fake group's answer."""
    averaged = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(averaged)
    done = torch.futures.Future()
    done.set_result(averaged)
    return done


def _words(error):
    """Which operator needs values, and the reader's line that asks for it."""
    operator = getattr(error, "func", None) or error
    where = [frame for frame in traceback.extract_tb(error.__traceback__)
             if is_learners(frame.filename)]
    text = (f"{operator} needs the values of a tensor, or has no rule for shapes alone, and a dry "
            "run has no values:")
    return "\n".join([text, *traceback.format_list(where[-1:])])


def _use_fused_kernels():
    """From now on, in this process, `F.rms_norm` keeps and makes what a GPU's kernel does.

    On a CPU, RMSNorm is several operations, which save two copies of their input in fp32. The fused
    kernel saves the input as it is, and one number for each row. Tensors in a dry run have no
    values, so that the memory is all there is to imitate.
    """
    F.rms_norm = lambda x, normalized_shape, weight=None, eps=None: _FusedRMSNorm.apply(
        x, len(normalized_shape), weight)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dimensions, weight):
        with torch.enable_grad():  # by which activations are told
            output = torch.empty_like(x)
            deviation = torch.empty(x.shape[:-dimensions], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, deviation)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)

"""A transformer's parameters and activations, against published counts and what autograd saves."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dplab.predict import catalogue
from dplab.predict.activations import activations
from dplab.predict.transformer_config import TransformerConfig

# Published counts: config.json and model cards on huggingface.co.
PARAMETERS = {
    "GPT-2": 124_439_808, "GPT-2 medium": 354_823_168, "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200, "Llama-2 7B": 6_738_415_616, "Llama-2 13B": 13_015_864_320,
    "Llama-2 70B": 68_976_648_192, "Llama-3 8B": 8_030_261_248, "Llama-3 70B": 70_553_706_496,
    "Llama-3.1 405B": 405_853_388_800,
}


def test_parameters_of_published_models():
    assert {name: model.parameters for name, model in catalogue.MODELS.items()} == PARAMETERS
    for name, model in catalogue.MODELS.items():
        assert model.name == name and "huggingface.co" in model.source
        units = model.units
        assert len(units) == model.layers + 1
        assert sum(math.prod(shape) for unit in units for shape in unit) == model.parameters


GPT = TransformerConfig(2, 24, 4, 96, 50, 16)
LLAMA = TransformerConfig(2, 24, 4, 40, 50, 16, kv_heads=2, gated=True, biases=False,
                          norm="rmsnorm", learned_positions=False, tied=False)


class Block(nn.Module):
    """A block as the config describes it, of torch's own modules; attention over each head."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        norm = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
        self.norm1, self.norm2 = norm(model.d_model), norm(model.d_model)
        for name, shape in model.block.items():
            if name.endswith("weight") and len(shape) == 2:
                self.add_module(name[:-7], nn.Linear(*reversed(shape), bias=model.biases))

    def forward(self, x):
        batch, sequence, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, sequence, -1, self.model.d_model // self.model.heads)
                   .transpose(1, 2) for part in (self.query, self.key, self.value))
        groups = self.model.heads // self.model.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, -1))
        y = self.norm2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.model.gated else F.gelu(self.up(y))
        return x + self.down(y)


def saved_bytes(block, x):
    """The bytes of the storages that autograd saves, without the block's parameters."""
    known = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
    nbytes = sum(storage.nbytes() for storage in saved.values())
    del y
    return nbytes


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_a_blocks_activations_are_what_autograd_saves(model):
    batch, sequence = 3, 10
    tokens = batch * sequence
    x = torch.randn(batch, sequence, model.d_model, requires_grad=True)
    measured = saved_bytes(Block(model), x)
    predicted = activations(model, batch, sequence, element=4)
    # What is left out, and what a CPU does: an RMSNorm in steps that also keeps its output before
    # the weights.
    left_out = 2 * 4 * tokens * (2 if model.norm == "layernorm" else 1)
    if model.norm == "rmsnorm":
        left_out += 2 * 4 * tokens * model.d_model
    assert measured == predicted.blocks // model.layers + left_out


def test_the_loss_keeps_probabilities_in_fp32():
    tokens, width = 30, GPT.vocabulary
    logits = torch.randn(tokens, width, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        F.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long))
    predicted = activations(GPT, 3, 10)
    assert max(saved) == predicted.loss == 4 * tokens * width
    assert predicted.logits == 2 * tokens * width


SMALL = {"layers": 1, "d_model": 8, "heads": 2, "d_ff": 32, "vocabulary": 9, "context": 4}


@pytest.mark.parametrize(("call", "says"), [
    (lambda: TransformerConfig(**SMALL | {"heads": 3}), "3 heads do not divide d_model = 8"),
    (lambda: TransformerConfig(**SMALL | {"heads": 4, "kv_heads": 3}), "3 kv_heads do not divide"),
    (lambda: TransformerConfig(**SMALL | {"layers": 0}), "layers is at least 1"),
    (lambda: activations(GPT, 0, 8), "batch is at least 1"),
    (lambda: activations(GPT, 1, 17), "positions for 16 tokens, not for 17"),
    (lambda: activations(GPT, 1, 8, recompute="some"), "'none', 'selective', 'full'")])
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()

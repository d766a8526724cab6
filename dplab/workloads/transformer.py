"""A decoder-only transformer from a configuration: GPT-2's kind and Llama's, in plain PyTorch.

GPT-2's kind has LayerNorm, learned positions, GELU, biases, and one matrix for the embedding and
the output. Llama's has RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases, and
two matrices. Every attention is `torch.nn.functional.scaled_dot_product_attention`.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Touvron et
al., "LLaMA", arXiv:2302.13971; Su et al., "RoFormer", arXiv:2104.09864; Shazeer, "GLU Variants
Improve Transformer", arXiv:2002.05202; Ainslie et al., "GQA", arXiv:2305.13245.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention: (batch, sequence, d_model) to the same shape.

    With fewer ``kv_heads`` than ``heads``, groups of query heads share a key and a value head.
    """

    def __init__(self, config):
        super().__init__()
        self.head_size = config.d_model // config.heads
        kv_size = config.kv_heads * self.head_size
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.biases)
        self.key = nn.Linear(config.d_model, kv_size, bias=config.biases)
        self.value = nn.Linear(config.d_model, kv_size, bias=config.biases)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.biases)

    def forward(self, x, rotation=None):
        query, key, value = (layer(x).unflatten(2, (-1, self.head_size))
                             for layer in (self.query, self.key, self.value))
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True,
                                               enable_gqa=query.shape[1] != key.shape[1])
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The position-wise part of a block: GELU between two layers, or SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.biases)
        self.gate = (nn.Linear(config.d_model, config.d_ff, bias=config.biases)
                     if config.gated else None)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.biases)

    def forward(self, x):
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised copy and added to the stream."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rotation=None):
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token numbers, int64 of (batch, sequence), to logits of (batch, sequence, vocabulary).

    ``config`` is a `dplab.predict.transformer_config.TransformerConfig`, whose ``parameters`` are
    as many as there are here. Initial values are GPT-2's, drawn from torch's current random state.
    Raises ValueError for sequences longer than learned positions reach.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = (nn.Embedding(config.context, config.d_model)
                          if config.learned_positions else None)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Draws the initial values: normal with deviation 0.02, less where blocks add up."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                scale = math.sqrt(2 * self.config.layers) if adds else 1.0
                parameter.normal_(0.0, 0.02 / scale)

    def forward(self, tokens):
        x, rotation = self.embedding(tokens), None
        length = tokens.shape[1]
        if self.positions is None:
            head_size = self.config.d_model // self.config.heads
            rotation = rotation_table(length, head_size, x.device, x.dtype)
        else:
            if length > self.config.context:
                raise ValueError(f"a sequence of {length} tokens, and learned positions for "
                                 f"{self.config.context}")
            x = x + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def rotation_table(length, head_size, device, dtype):
    """Cosine and sine of each position's rotation, two tensors of (length, 1, head_size / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angle = torch.arange(length, device=device)[:, None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x, table):
    """(batch, sequence, heads, head_size): the pair (i, i + head_size / 2), turned by its position.
    """
    cosine, sine = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _norm(config):
    kind = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[config.norm]
    return kind(config.d_model, eps=1e-5)

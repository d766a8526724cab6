"""What forward leaves in memory for backward, by the formulas of Korthikanti et al.

A rank's activations belong to its own part of the batch: data parallelism never shards them, and
never copies them either. Counted is what autograd saves, each tensor once: inputs of linear
layers, norms and nonlinearities, queries, keys and values. Left out as small: the norms' statistics
(8 bytes a token and norm), masks, rotary tables.

Source: V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022, https://arxiv.org/abs/2205.05198, section 4.
"""

from dataclasses import dataclass

from dplab.predict.checks import one_of, whole
from dplab.predict.job import RECOMPUTE
from dplab.predict.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank at the end of forward, but for ``recomputed``.

    ``blocks``: what they keep; ``recomputed``: what one block needs when backward computes its
    activations again; ``ends``: the inputs of the last norm and of the head; ``logits``: the head's
    output; ``loss``: its logarithmic probabilities in fp32, which cross-entropy keeps.
    """

    blocks: int
    recomputed: int
    ends: int
    logits: int
    loss: int

    @property
    def total(self) -> int:
        return self.blocks + self.recomputed + self.ends + self.logits + self.loss


def activations(model: TransformerConfig, batch: int, sequence: int, *, element: int = 2,
                recompute: str = "none", autocast: bool = False) -> Activations:
    """The activations of ``batch`` sequences of ``sequence`` tokens: the *local* batch of a rank.

    Attention never stores its scores of sequence × sequence, but 4 bytes a token and head.
    ``element``: bytes of an activation; ``recompute``: one of `job.RECOMPUTE`; ``autocast``: the
    model is in fp32, so the stream between the layers and what the norms make of it stay in fp32,
    and each linear layer keeps a copy of its input in ``element`` bytes. Raises ValueError for an
    unknown ``recompute``, and for a sequence longer than the learned positions.
    """
    one_of(recompute, RECOMPUTE, "recompute")
    tokens = whole(batch, "the batch") * whole(sequence, "the sequence")
    element = whole(element, "bytes of an activation")
    if model.learned_positions and sequence > model.context:
        raise ValueError(f"{model.name or 'the model'} has positions for {model.context} tokens, "
                         f"not for {sequence}")
    scores = 4 * model.heads
    stream = 4 if autocast else element
    block = tokens * (_linear(model, element, stream) + scores)
    entry = tokens * stream * model.d_model
    # As torchtitan's selective checkpointing by operation: the block's input, the outputs of the
    # first, third, fifth and seventh product, and attention's.
    products = entry + tokens * (scores + element * (
        3 * model.d_model + model.d_kv + model.d_ff))
    kept, recomputed = {
        "none": (block, 0),
        "selective": (products, block - products),
        "full": (entry, block - entry),
    }[recompute]
    ends = entry + tokens * model.d_model * element
    return Activations(blocks=model.layers * kept, recomputed=recomputed, ends=ends,
                       logits=tokens * element * model.vocabulary,
                       loss=4 * tokens * model.vocabulary)


def _linear(model, element, stream):
    """Bytes of a block per token, without the attention scores; ``stream``: of a norm's input."""
    # The gated unit keeps gate and up, the gate after its nonlinearity, and their product.
    inside = (4 if model.gated else 2) * model.d_ff
    inputs = 2  # what the norms make, for the layers of attention and for those of feed-forward
    if stream != element:
        inputs = 3 + (2 if model.gated else 1)  # a copy for each layer
    attention = 2 * model.d_model + 2 * model.d_kv  # the queries, and what goes into `out`
    return (2 * model.d_model * stream
            + element * (inputs * model.d_model + attention + inside))

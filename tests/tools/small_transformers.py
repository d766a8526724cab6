"""A GPT and a Llama that take a step in a moment, also on a CPU."""

from dplab.predict.transformer_config import TransformerConfig

GPT = TransformerConfig(layers=3, d_model=48, heads=4, d_ff=192, vocabulary=101, context=64)
LLAMA = TransformerConfig(
    layers=3, d_model=48, heads=4, kv_heads=2, d_ff=130, vocabulary=101, context=64, gated=True,
    biases=False, norm="rmsnorm", learned_positions=False, tied=False)

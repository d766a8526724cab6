"""What arithmetic says, in plain Python: no torch, and nothing else of dplab.

Data first: `catalogue` has published links, GPUs and models, `transformer_config` a model's
tensors, `precision` bytes per parameter, `job` what is trained on which cluster. What computes with
it: `cost`: bytes, messages and seconds of a collective; `step`: one step in time; `memory`: model
states and what fits; `moments`: when a step holds most, and what; `shards`: exact bytes of real
implementations; `activations`; `traffic`: bytes per step of each strategy; `kernels`: how long
computing takes, at the measured `rates`; `network`: a collective on a cluster, as NCCL was
measured; `pace`: slow, typical or fast of measured rates; `cluster`: a step on any number of ranks
and how it scales; `published`: runs that others measured, beside what is predicted for them;
`reached`: the range that such runs make; `rent`: days, GPU-hours and money, with failures;
`choose`: a recommendation that says why. The planner: `fields`: what may be asked; `plan`: the
answer; `settings`: the code to copy.
"""

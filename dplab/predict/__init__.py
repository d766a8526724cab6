"""What arithmetic says, in plain Python: no torch, and nothing else of dplab.

`cost`: bytes, messages and seconds of a collective; `step`: one step in time; `memory`: model
states and what fits; `moments`: when a step holds most, and what; `shards`: exact bytes of real
implementations; `activations`; `traffic`: bytes per step of each strategy; `kernels`: how long
computing takes, at the measured `rates`; `network`: a collective on a cluster, ideal and as NCCL
was measured; `pace`: slow, typical or fast of measured rates; `cluster`: a step on any number of
ranks and how it scales; `reliability`: slow ranks and failing ones; `choose`: a recommendation that
says why, and `settings` the code for it; `plan`: all of that as an answer to an address, `fields`:
what may stand in one, `plan_as_text`: the answer for a terminal; `transformer_config`: a model's
tensors; `catalogue`: published links, GPUs and models; `published`: runs that others measured,
beside what is predicted for them.
"""

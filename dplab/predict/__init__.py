"""What arithmetic says, in plain Python: no torch, and nothing else of dplab.

`cost`: bytes, messages and seconds of a collective; `catalogue`: published links and GPUs.
"""

"""Models of megatron-core's layers, and its datasets.

`stack.py` has `from_megatron` and the small GPT whose options are in `gpt.py`, without torch.
`checks.py` refuses what the layers do not do. `layers.py` builds the modules, `experts.py` mixtures
of experts, and `context.py` lets the workers of a node split sequences. `linear.py` splits the
backward pass of a matrix product. `data.py` has `megatron_dataset`.
"""

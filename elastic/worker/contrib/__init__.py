"""Ready-made models and data on top of `elastic.worker.model`; the runtime does not depend on it.

`megatron.py` builds a GPT from megatron-core's layers and is the only file that imports
megatron.core. `gpt.py` has the model's options, and `corpus.py` reads text; neither imports torch.
`data.py` draws byte-level samples. To write your own model, start with `megatron.GPTStack` as an
example of a `LayerStack`.
"""

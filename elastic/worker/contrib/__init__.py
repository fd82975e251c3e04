"""Ready-made models and data on top of `elastic.worker.model`; the runtime does not depend on it.

`megatron.py` builds a GPT from megatron-core's layers and is the only file that imports
megatron.core. `gpt.py` has the model's options, and `corpus.py` reads text; neither imports torch.
`data.py` draws byte-level samples. `huggingface.py` cuts a transformers model into layers, with the
stand-ins for its modules in `huggingface_cut.py`, and `safetensors_folder.py` reads its weights.
`sequential.py` cuts a sequence of modules. To write your own model, start with
`megatron.GPTStack` as an example of a `LayerStack`.
"""

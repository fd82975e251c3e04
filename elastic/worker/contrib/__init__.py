"""Ready-made models and data on top of `elastic.worker.model`; the runtime does not depend on it.

`megatron.py` makes models of megatron-core's layers (`megatron_layers.py`), with mixtures of
experts (`megatron_experts.py`) and split sequences (`megatron_context.py`). `gpt.py` has the
options of the small GPT among them, and `corpus.py` reads text; neither imports torch. `data.py`
draws byte-level samples. `huggingface.py` cuts a transformers model into layers, with the stand-ins
for its modules in `huggingface_cut.py`; `safetensors_folder.py` reads its weights, and
`huggingface_export.py` writes them. `sequential.py` cuts a sequence of modules. To write your own
model, start with `megatron.MegatronStack` as an example of a `LayerStack`.
"""

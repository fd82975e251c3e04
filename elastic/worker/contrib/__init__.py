"""Ready-made models and data on top of `elastic.worker.model`; the runtime does not depend on it.

`megatron` has models of megatron-core's layers and its datasets, `huggingface` cuts models of
transformers, and `sequential.py` cuts a sequence of modules; `whole_model.py` has what the last two
have in common. `weights.py` reads initial values, and `distributed_checkpoint.py` reads checkpoints
of torch.distributed.checkpoint. `corpus.py` reads text, without torch, and `data.py` draws
byte-level samples from it. To write your own model, start with `megatron.stack.MegatronStack` as an
example of a `LayerStack`.
"""

"""Models of transformers: cut into layers, with weights from and to folders.

`stack.py` has `from_huggingface`, and `cut.py` the stand-ins for a model's modules; only these two
import transformers. `weights.py` reads the files of a folder. `export.py` writes a checkpoint as a
folder. `adapters.py` adds LoRA adapters of peft, and `adapter_export.py` writes them.
"""

"""Make a folder with a tiny Llama of random weights, to try a fine-tuning without a download.

python -m examples.tiny_llama FOLDER [--lora FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(folder: Path, lora: Path | None) -> int:
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        if lora is not None:
            import peft
    except ImportError as error:
        extra = "hf" if lora is None else "lora"
        print(f"tiny_llama: {error}: pip install 'elastic-runtime[{extra}]'", file=sys.stderr)
        return 2
    for path in (folder, lora):
        if path is not None and path.exists():
            print(f"tiny_llama: {path} exists; give another", file=sys.stderr)
            return 2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if lora is not None:
        peft.LoraConfig(r=8, target_modules="all-linear").save_pretrained(str(lora))
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) >> 10} KiB")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m examples.tiny_llama", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", type=Path, help="folder for the config of adapters")
    flags = parser.parse_args()
    sys.exit(main(flags.folder, flags.lora))

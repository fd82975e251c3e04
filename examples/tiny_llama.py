"""Make a folder with a tiny Llama of random weights, to try a fine-tuning without a download.

python -m examples.tiny_llama FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(folder: Path) -> int:
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        print(f"tiny_llama: {error}: pip install 'elastic-runtime[hf]'", file=sys.stderr)
        return 2
    if folder.exists():
        print(f"tiny_llama: {folder} exists; give another", file=sys.stderr)
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
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) >> 10} KiB")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m examples.tiny_llama", description=__doc__)
    parser.add_argument("folder", type=Path)
    sys.exit(main(parser.parse_args().folder))

"""Examples: a recovery (`demo.py`), a GPT's training (`train_gpt.py`), plain torch (`ddp.py`).

Start with `train_gpt.py`. The demo runs it twice, with and without a failure, and compares the
results. The package `elastic` imports none of these modules.
"""

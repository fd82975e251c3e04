"""Example programs: `demo.py` shows a recovery, `train_gpt.py` trains a GPT, `ddp.py` is plain
torch.

Start with `train_gpt.py`. The demo runs it twice, with and without a failure, and compares the
results. Nothing in the package `elastic` imports these modules.
"""

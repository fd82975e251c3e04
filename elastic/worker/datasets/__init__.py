"""Micro-batches from datasets: map-style, streamed, from a DataLoader, packed, read in advance.

Each source is a function of (step, micro-batch), so any worker can ask for any micro-batch at any
time. That is what makes the order of samples independent of the number of nodes and of faults.
`data_source.py` checks what such a function returns, and `weighting.py` weighs micro-batches.
"""

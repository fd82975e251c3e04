"""Benchmarks: `python -m benchmarks.FOLDER.NAME` runs one, and `make bench` runs all.

Each folder has the name of the measured part; engine.py measures the worker. The other modules are
shared: results.py, emulated.py (emulated runs) and waiting.py (their training script). `results/`
has the measured values.
"""

"""Brings a worker's layers to the version and ledger that an assignment asks for.

Start with `state_loader.py`, which follows the recipes of an assignment. `fetch.py` reads and
verifies copies from vaults, and `final_hash.py` hashes the parameters of a finished job. The
coordinator decides which copies are used (`elastic.core.recovery`); nothing here chooses.
"""

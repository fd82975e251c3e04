"""Runs policies on traces over several seeds and compares them.

- replay.py runs policies and summarises them. Start reading there.
- advise.py replays mixes of spot and on-demand nodes and ranks their costs.
- show.py formats the results for the terminal and as JSON.

This package must not write files or draw charts; `elastic_sim.cli` and `elastic_sim.report` do.
"""

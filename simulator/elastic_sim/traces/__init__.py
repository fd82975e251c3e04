"""Availability traces: which nodes are present when.

- trace.py has the types and our CSV format. Start reading there.
- generate.py makes traces from a failure rate, or like a recorded one; statistics.py measures them.
- importers.py converts recorded traces of other projects; fetch.py downloads them.

This package must not import the simulation.
"""

"""The coordinator's decisions.

`transitions.py` has the transition with its table of rules per phase; start reading there.
`event_handlers.py` records each event in the state before the rules apply. `authorization.py`
checks a node's message before it becomes an event. This package must not use streams, storage or
clocks: they are in `elastic.coordinator`.
"""

"""Policies: one module per rule that may change the plan of a running job.

Each rule takes the state and the time, and returns None or (state, actions, reason).
`elastic.core.coordinator.transitions` calls the rules in order; a rule must not import it. A rule
changes the plan only through `elastic.core.job.epoch_change.begin_change`. Start reading in
`drain.py`.
"""

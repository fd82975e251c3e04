"""Policies: one module per rule that may change the plan of a running job.

Each rule takes the state and the time, and returns (state, actions, reason), or None if the rule
does not apply. `elastic.core.coordinator.transitions` calls the rules in order; rules must not
import that module. A rule changes the plan only through
`elastic.core.job.epoch_change.begin_change`. Start reading in `drain.py`.
"""

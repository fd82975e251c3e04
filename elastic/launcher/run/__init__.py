"""Supervision of the processes of a job on this machine.

`supervisor` starts coordinators and agents (`processes`) in a locked run directory (`rundir`),
reads the coordinator's files (`event_tail`), and prints progress and events (`console`).
`injected` times the faults that the launcher carries out; `metrics_endpoint` chooses ports;
`trackers` holds the processes of `--track`. The supervisor restarts coordinators and trackers,
never agents, and leaves no process behind. Start reading in `supervisor.py`.
"""

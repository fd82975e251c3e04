"""The coordinator: the process that decides about a job. Of several coordinators one leads.

- `service`: the process and its main loop; start reading here.
- `leadership`: the leader's lease, and standbys that wait for it.
- `event_queue`: all events, with their times of arrival; `session_filter`: rejects messages.
- `queries`: answers to the command line; `metrics`: counters and gauges.
- `records`: the saved state and the files of the run directory. `records.state_saver` describes
  the case that the store (etcd or SQLite) cannot be reached.

`elastic.core` makes the decisions; this package carries them out. The coordinator takes no part in
the computation of steps and must not import torch.
"""

"""The coordinator: the process that decides about a job. Of several coordinators one leads.

- `service`: the process and its main loop; start reading here.
- `leadership`: the lease of the leader, and standing by for it.
- `event_queue`: all events, with their time of arrival; `session_filter`: rejects messages.
- `queries`: answers to the command line; `metrics`: counters and gauges.
- `records`: the saved state and the files of the run directory. `records.state_saver` tells what
  happens when the store (etcd or SQLite) is away.

The decisions are made in `elastic.core`; nothing here decides. The coordinator is not on the
training path and must not import torch.
"""

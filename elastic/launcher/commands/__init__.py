"""The commands of `elastic`, except for `certs` and `kubernetes`.

`run` holds `elastic run`, `coordinator` and `agent`. `queries` holds the commands that call a
running job, and prints answers as text or JSON; `watch` repeats `elastic status`. `plans`,
`profile` and `preflight` work without a job. A command module holds no logic of training or
planning. Start reading in `run.py`.
"""

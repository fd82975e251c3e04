"""Flags of `elastic run`, and their validation.

`flags` defines the options. `validators` checks single values and rules over several flags.
`request` combines them into a `Request` with the job's configuration. `script`, `addresses` and
`ray_options` check the script, this machine's addresses and the flags of Ray; `certs` is the
command that makes certificates. Nothing here starts a process or writes into a run directory.
Every error is a FieldError that names the flag. Start reading in `request.py`.
"""

"""The command line of elastic, and the supervisors that run a job's services on a machine.

`cli` imports the module of a command when it is used. `flags` turns flags into a checked
`Request`, without side effects. `run` supervises the processes of a job on this machine; `ray`
does the same with agents on a Ray cluster. `tracking` tells TensorBoard and others what a run
does. `commands` holds the other commands, and `kubernetes` renders manifests. The coordinator, not
the launcher, makes all decisions about training. The launcher does not import torch. Start reading
in `commands/run.py`, then `run/supervisor.py`.
"""

"""The pure core: all decisions of the coordinator, of the agents and of the recovery.

- `coordinator`: the coordinator's transition, its event handlers and the check of messages.
- `policy`: rules for drains, stragglers, slow links, restarts, admission and backup schemes.
- `job`: state of the job, epoch changes, membership, quarantine, goodput.
- `node`: the agent's transition, and the notices about its node.
- `recovery`: sources of each layer's state after a fault, and the micro-batches that run again.
- `health`: measured speeds and the diagnosis of nodes.
- `protocol`: messages between coordinator, agents and workers, and the limits on waiting.

No module reads a clock, does input or output, uses threads or draws random numbers: time is an
argument. Start reading in `coordinator/transitions.py`; a recovery is in `job/epoch_change.py`.
"""

"""The agent: the process on a node that supervises its workers and owns its vault.

- `service`: the process itself; start reading here. A node's rules are in `elastic.core.node`.
- `workers`: starts worker processes, copies their output, and receives their messages.
- `vault`: the copies that this node keeps for itself and for its peers.
- `health`: the pre-flight before the node joins, and health reports while it runs.
- `network_cut`: an injected fault of the network.
- `notices`: warnings that the node will be taken away.

An agent decides nothing about the job, which is the coordinator's task, and never imports torch.
"""

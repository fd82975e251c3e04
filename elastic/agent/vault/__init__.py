"""The vault: a node's store of copies, outside the worker processes.

- `vault`: the index of whole copies; start reading here. `retention`: the copies that it keeps.
- `server`: serves the vault to peers and local workers.
- `replicator`: sends this node's copies to peers; `prefetch`: fetches state before a join.
- `checkpoints`: writes durable checkpoints from the copies.

The wire protocol is in `elastic.rpc.bulk`. Which peer gets which copies is the planner's decision.
"""

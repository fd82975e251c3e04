"""Communication between the workers of one epoch, on gloo and NCCL.

`links.Links` is the entry point: point-to-point messages between stages, all-reduce and all-gather
over the holders of a layer, and a small gather over all ranks. `interface` defines what a backend
offers; `gloo`, `nccl`, `host_memory` (for workers that share a GPU) and `shaped` (a slowed-down
network for tests) implement it. `cancellation` defines how a blocked worker leaves an epoch, and
`rendezvous` how the ranks find each other.
`link_probe` and `device_check` are programs that measure a link and check the devices of a node.
This package moves tensors and knows nothing of plans, ledgers or backups. Read `links` first.
"""

"""Stored state of a job: coordinator store, checkpoint files and shared-memory copies.

`interface` defines the coordinator store: a small key-value store with compare-and-set and a fenced
lease. `sqlite` (one machine) and `etcd` (several machines) implement it, and
`open_store` opens the one that the job's configuration names. `checkpoint_directory` writes and
reads durable checkpoints, as files in the format of `safetensors_stream`. `shared_memory` holds
the copies that survive the death of the worker that wrote them. Nothing here decides what is
stored or when: the coordinator, the agent and the worker do. This package must not import torch,
and it imports grpc and etcd3 only below `etcd`. Start reading with `interface`.
"""

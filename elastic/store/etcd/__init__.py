"""The coordinator store on etcd, through the client package etcd3.

`store` implements the interface and is the place to start reading. `connection` makes the calls
and changes the etcd member when one fails. `compatibility` makes etcd3 importable, with the message
classes in `etcd_api_pb2` (generated from etcd_api.proto). Only `open_store` imports this package,
because etcd3 is an optional dependency.
"""

from elastic.store.etcd.store import EtcdStore

__all__ = ["EtcdStore"]

"""The store on etcd, with the `etcd3` package: messages (makes it importable), link, store, watch."""

from elastic.store.etcd.store import EtcdStore

__all__ = ["EtcdStore"]

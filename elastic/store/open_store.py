"""Opens the coordinator store that a job's configuration names."""

from __future__ import annotations

from pathlib import Path

from elastic.config import JobConfig
from elastic.domain.errors import ElasticError, FieldError
from elastic.store.interface import Store, StoreUnavailable
from elastic.store.sqlite import SqliteStore


def open_store(config: JobConfig) -> Store:
    """Open the store on etcd if the configuration has its address, else the SQLite file.

    Raises StoreError if the store cannot be used, MissingExtra if the package for etcd is missing.
    An unreachable etcd raises StoreUnavailable only at the first call of a method.
    """
    if not config.store.shared:
        return SqliteStore(Path(config.run_dir) / "coordinator.db")
    from elastic.store.etcd import EtcdStore

    return EtcdStore(config.store, f"elastic/{config.name}")


def check_store(config: JobConfig) -> None:
    """Raise FieldError if a shared store refuses the job, StoreUnavailable if it does not answer.
    Call this before any process starts."""
    if not config.store.shared:
        return
    store = open_store(config)
    try:
        store.get("job/state")
    except StoreUnavailable:
        raise
    except ElasticError as error:
        raise FieldError("--store", config.store.url, str(error)) from error
    finally:
        store.close()

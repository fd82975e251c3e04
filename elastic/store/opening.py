"""Opens the store that a job's configuration names."""

from __future__ import annotations

from pathlib import Path

from elastic.config import JobConfig
from elastic.domain.errors import FieldError
from elastic.store.base import Store
from elastic.store.sqlite import SqliteStore

MAKE = "pip install 'elastic-runtime[etcd]'"


def open_store(config: JobConfig) -> Store:
    """Raises StoreError or FieldError when it cannot be used at all; being out of reach shows at the first call."""
    if not config.store.shared:
        return SqliteStore(Path(config.run_dir) / "coordinator.db")
    try:
        from elastic.store.etcd import EtcdStore
    except ImportError as error:
        raise FieldError("--store", config.store.url, f"it needs a package: {MAKE} ({error})") from error
    return EtcdStore(config.store, f"elastic/{config.name}")


def check_store(config: JobConfig) -> None:
    """Raise FieldError unless a shared store answers now; for before anything is started."""
    if config.store.shared:
        from elastic.domain.errors import ElasticError

        store = open_store(config)
        try:
            store.get("job/state")
        except ElasticError as error:
            raise FieldError("--store", config.store.url, str(error)) from error
        finally:
            store.close()

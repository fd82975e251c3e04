"""Imports the client package `etcd3` next to a current protobuf."""

from __future__ import annotations

import sys
from types import ModuleType

from elastic.domain.errors import needs_extra

ETCD_VERSION = "3.5.16"
"""Version of etcd that the manifests of deploy/kubernetes start, and that the tests run where
`make tools` can get it. A test compares them."""


def load_etcd3() -> ModuleType:
    """Return the package `etcd3`. Raises MissingExtra if it is not installed.

    etcd3 0.12.0 ships message classes that were generated for protobuf 3. Later versions of
    protobuf refuse to import them. This function registers our own generated classes under the
    name of etcd3's module `rpc_pb2` before the first import of etcd3. Both describe the same
    messages. All message names in protobuf's global registry are our own, so other users of
    protobuf in this process see no difference.
    """
    with needs_extra("etcd", "A store on etcd"):
        from elastic.store.etcd import etcd_api_pb2

        sys.modules.setdefault("etcd3.etcdrpc.rpc_pb2", etcd_api_pb2)
        import etcd3
    return etcd3  # type: ignore[no-any-return]

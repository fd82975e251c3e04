"""Namespaces, or the reason why not."""

from __future__ import annotations

import pytest

from tests.kubernetes.network import missing


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where pods cannot have namespaces of their own."""
    why = missing()
    if why:
        pytest.skip(why)

"""Fixture for tests that need network namespaces."""

from __future__ import annotations

import pytest

from tests.kubernetes.network import missing


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip the test if pods cannot have namespaces of their own."""
    why = missing()
    if why:
        pytest.skip(why)

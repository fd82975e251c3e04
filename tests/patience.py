"""How long tests wait for what must come: time never decides whether they pass."""

from __future__ import annotations

LONG_S = 120.0
"""Seconds after which something that is sure to happen has not: no machine is as slow and as busy as that."""

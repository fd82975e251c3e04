"""How long tests wait for what must come: time never decides whether they pass."""

from __future__ import annotations

LONG_S = 120.0
"""Seconds after which a certain event counts as missing, even on a slow and busy machine."""

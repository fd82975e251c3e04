"""Shared by every area: one torch thread a process, so that several processes do not fight for the cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

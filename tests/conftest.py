"""For every area: one torch thread a process, and property tests that a busy machine cannot fail."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")

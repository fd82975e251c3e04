"""For every area: one torch thread a process, and property tests that a busy machine cannot fail."""

from __future__ import annotations

import os
import secrets

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Only who has it may use the Ray clusters of the tests. Ray reads it when it is imported, which any test may do first.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ.pop("RAY_ADDRESS", None)

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")

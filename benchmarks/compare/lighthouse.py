"""Serve torchft's lighthouse, which decides which replica groups take part in a step.

Its command `torchft_lighthouse` does the same, but is not on the path of every environment.
"""

from __future__ import annotations

import argparse
import signal

from torchft.coordination import LighthouseServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    parser.add_argument("--join-timeout-ms", type=int, required=True)
    args = parser.parse_args()
    server = LighthouseServer(
        bind=args.bind,
        min_replicas=1,
        join_timeout_ms=args.join_timeout_ms,
        quorum_tick_ms=100,
    )
    try:
        signal.pause()
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()

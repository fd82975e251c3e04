"""Replays availability traces against the real planner and its rivals. Never imported by `elastic`."""

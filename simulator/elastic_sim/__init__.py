"""Simulator: replays availability traces against the real planner and models of rival systems.

- traces/ reads, generates and imports traces. steps/ simulates a job step by step; its policies/
  has one file per system (ours, Varuna, Oobleck, ...). replay/ runs policies over several seeds.
- microbatches/ runs the real coordinator and agent code on virtual time, message by message.
- reproduce/ recomputes published tables. report/, sweep/ and cli/ are the user's interface.

Start with steps/engine.py and steps/policies/__init__.py. `elastic` must never import this package.
"""

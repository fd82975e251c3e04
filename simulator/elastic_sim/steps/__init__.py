"""Step-level simulation: a job on a trace, one training step at a time.

- engine.py advances virtual time and asks a policy after every event. Start reading there.
- policies/ has our own policy, models of rival systems, and upper bounds.
- world.py times plans with the real cost model; rival_planners.py models the planners of
  Varuna and Oobleck; physics.py and clusters.py have durations, node types and prices.
- time_accounting.py assigns every node-millisecond to one use. scenario.py describes the inputs.

This package must not import reports, sweeps or the command line.
"""

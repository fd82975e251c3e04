"""The micro-batch level of the simulator: our policy, action by action, on virtual time.

The decisions are the real ones of `elastic.core` and `elastic.planning`. Agents, workers, vaults,
links and the coordinator's own time are simulated. `validate` compares real runs with their
simulation. This package must not decide anything that `elastic.core` decides. Start reading at
`world.simulate`; imports go down from there: world, control_plane, worker, copies, environment.
"""

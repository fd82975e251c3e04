"""Recomputes published tables from the published rules and constants of each system.

- tables.py has the published values and compares them with ours. Start reading there.
- oobleck_artifact.py is the simulation in Oobleck's artifact, with its models of Varuna and Bamboo.
- parcae_artifact.py and parcae_measurements.py are Parcae's optimizer and its measured constants.

These models are separate from the policies in `elastic_sim.steps.policies`: they follow the
authors' programs, errors included, and must not use our planner or cost model."""

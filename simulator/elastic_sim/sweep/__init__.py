"""Sweeps: many simulations, run in parallel and resumable.

A cell is one scenario, policy and seed. `sweep` keeps finished cells in a folder and summarizes
them. Backends run cells on processes of this machine or on a Ray cluster. Results never depend on
the backend or on the order of cells. Only `ray_backend` may import ray, which is optional. Start
reading at `sweep.run`.
"""

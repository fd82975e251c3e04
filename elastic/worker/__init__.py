"""The worker: one process that trains some layers of the model on one device.

Start with `trainer`, the user's entry point. `epoch_session` runs one epoch with the objects of
`context`, which outlive the epoch. The subpackages are `model` (layers, gradients, optimizer),
`replica` (one layer with its ledger), `engine` (the training step), `backup` (published copies),
`recovery` (reading copies back), `transport` (communication between workers), `control` (the
connection to the agent), `profiling` (measured and emulated layers), and `contrib` (adapters).
The worker carries out plans and makes none. It talks to its own agent only, never to the
coordinator, and reads other nodes' copies only from their vaults.
"""

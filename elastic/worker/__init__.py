"""The worker: one process that trains some layers of the model on one device.

Start with `trainer`, the user's entry point, and `epoch_session`, which installs, trains and leaves
one epoch on the `context` of the process. Below them are: `model` (layers, gradients, optimizer),
`replica` (one layer with its ledger), `engine` (the training step), `backup` (published copies),
`recovery` (reading copies back), `transport` (communication between workers), `control` (the
connection to the agent), `profiling` (measured and emulated layers), and `contrib` (adapters).
The worker carries out plans and makes none. It talks to its own agent only, never to the
coordinator, and reads other nodes' copies only from their vaults.
"""

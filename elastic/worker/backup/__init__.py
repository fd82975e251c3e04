"""Backup of a worker's layers: copies in shared memory that the agent keeps and sends to peers.

Start with `protection.py`: `Protection` decides when gradients and states are copied under the
plan's scheme, and what must be safe before an update. `publisher.py` writes copies into slots and
announces them; `items.py` lists the copies, and `copier.py` writes them in the background.
`activation_log.py` keeps the messages between stages for the `log` scheme, `snapshot_schedule.py`
picks the layers whose whole state is due, and `metrics.py` counts bytes and seconds. Nothing here
sends data over the network or decides on a recovery: that is the work of agent and coordinator.
"""

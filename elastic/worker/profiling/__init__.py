"""Layer times: their measurement for `elastic profile`, and layers that reproduce them.

`measure` times each layer of a script on this device; start there. `emulated` defines layers that
wait for the times of a profile instead of computing, for `--emulate`. `run_profile` checks that the
run's profile fits the script, and selects the script's layers or the emulated layers. The cost
model that uses these times is in `elastic.planning.cost`; this package predicts nothing.
"""

"""Health of a node: checks before it joins, and reports while it is a member.

- `preflight`: the checks; `preflight_gate`: makes them before the node asks to join. Start there.
- `monitor`: samples disks, memory, devices and links; `devices`: reads accelerators through NVML.

Nothing here decides what a finding means: the coordinator does (`elastic.core.health`).
"""

"""Health of a node: checks before it joins, and reports while it is a member.

- `preflight_gate`: makes the checks before the node asks to join; start reading here.
- `preflight`: the checks.
- `paths`: asks other nodes for an answer, over the network that the workers use.
- `monitor`: samples disks, memory, devices and links; `devices`: reads accelerators through NVML.

Nothing here decides what a finding means: the coordinator does (`elastic.core.health`).
"""

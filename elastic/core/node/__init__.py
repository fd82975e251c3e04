"""The agent's decisions about its node.

`node.py` has the agent's state, its transition and the detection of hung workers; start reading
there. `notice_tracker.py` combines the notices of all sources. `path_watch.py` decides when another
node is unreachable. This package must not use processes, sockets or clocks: they are in
`elastic.agent`.
"""

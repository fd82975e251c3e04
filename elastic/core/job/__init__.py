"""State of the job, and the decisions about its members and epochs.

`state.py` has the state, the events and the actions of the coordinator. `epoch_change.py` begins an
epoch change and decides its plan, also after a second fault during a recovery. The other modules
hold one concept each: membership, join policy, quarantine, bad paths between nodes
(`reachability.py`), compute speed (`stragglers.py`), measured conditions, goodput, and the agents
of a cluster (`fleet.py`). Functions return a new state and never change their arguments. Modules
must not import `policy` or `coordinator`. Start reading in `state.py`.
"""

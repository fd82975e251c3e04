"""Agents on the machines of a Ray cluster.

`supervisor` extends the local supervisor: `elastic.core.job.fleet` decides which machines have
agents. `remote_agent` runs one agent on such a machine. Both know only the protocol
`AgentCluster`; `ray` implements it and is the only module that imports ray. Start reading in
`supervisor.py`.
"""

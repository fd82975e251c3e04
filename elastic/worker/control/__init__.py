"""The worker's connection to its agent, and the measurements that it reports.

Start with `agent_client.AgentClient`, which receives orders, sends reports and heartbeats, and sets
the signal that ends an epoch. Its module also has the settings that the agent passes at start.
`step_timing` measures how long the stages of this worker compute. This package decides nothing
about the job and knows neither layers nor plans.
"""

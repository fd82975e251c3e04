"""The worker's connection to its agent, and the measurements that it reports.

`agent_client` holds the settings that the agent passes at start, receives orders, sends reports
and heartbeats, and sets the signal that ends an epoch. `step_timing` measures how long the stages
of this worker compute. Start with `agent_client.AgentClient`. This package decides nothing about
the job and knows neither layers nor plans.
"""

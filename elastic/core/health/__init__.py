"""Health of nodes, links and devices, judged from measurements.

All modules are pure functions of samples and reports. Agents and workers measure;
`elastic.core.policy` puts the findings into the job's state and acts. Start with the table in
`diagnosis`. `compute_speed` and `link_speed` tell when a node or a link is slow, `path_fault` keeps
pairs of nodes that cannot reach each other, and `backup_metrics` collects the measured cost of
backups.
"""

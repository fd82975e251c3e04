"""Planning: which nodes run which layers, on which schedule, with which backups.

`search` finds the plan with the shortest step, using the costs of `cost` and the schedules of
`schedule`. `plan` holds the text format and checks of plans. `placement` assigns nodes so that
little state moves, `backup` chooses peers and backup schemes, and `capacity` answers what-if
questions about clusters. Everything is a pure function of its arguments: no clock, files, network
or processes, and no import of `elastic.core`. Start with `search.search.make_plan` and
docs/design/planner.md.
"""

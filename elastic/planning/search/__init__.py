"""The search for the plan with the shortest step.

`search.make_plan` is the entry: it checks the `request`, makes a `problem` of node kinds, and
solves it. `exact` serves small clusters and `column_search` large ones; `equal_nodes` adds plans
for nodes of one kind. `fixed_shape` serves requested depths, and `incremental` plans again after a
change. `assemble` turns the solution into a plan. The modules do no input or output, and equal
requests yield equal plans. Start reading with `search`.
"""

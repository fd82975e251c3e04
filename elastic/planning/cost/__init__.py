"""Costs of layers, stages and whole plans on device types and links.

`profile` holds measured or published figures, and `cost_model` turns them into seconds and bytes of
stages by closed forms. `predict` simulates a given plan, which is more precise.
`published_profiles` makes profiles from the sizes in `catalogue`, and `node_kinds` groups equal
nodes. Nothing here chooses a plan or reads a file. Start with `profile`, then `cost_model`.
"""

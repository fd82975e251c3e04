"""Placement: the assignment of nodes to a plan's slots, and the moves that a new plan needs.

`placement` assigns nodes so that the fewest bytes move, with the matching of `assignment`.
`migration` lists the moves and their time, and `balance` spreads them over senders. Nothing here
moves data or chooses a plan's shape. Start with `placement`.
"""

"""Backups of a plan: peers, schemes, and the payoff of plan changes.

`peer_assignment` chooses the node that keeps each node's backups. `backup_cost` estimates pairs of
backup schemes and chooses the best pair. `loss_history` estimates the time to the next loss, and
`amortization` decides whether a change is worth its pause. Nothing here moves data. Start with
`peer_assignment`.
"""

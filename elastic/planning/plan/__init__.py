"""The text form of plans, their validation, and what a plan implies for workers.

`plan` formats, parses and validates plans. `rank_map` derives ranks and neighbours, `schemes`
parses the names of backup schemes, and `units` parses sizes, bandwidths and durations. Nothing here
estimates costs or chooses a plan. Start with `plan`.
"""

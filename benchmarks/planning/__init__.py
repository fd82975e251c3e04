"""The planner and its cost model: speed, quality, and predictions against real runs."""

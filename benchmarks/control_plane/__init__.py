"""The coordinator: its load, its decisions, and the time without a leader."""

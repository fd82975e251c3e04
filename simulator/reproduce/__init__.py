"""Published tables, from the published rules and constants of each system."""

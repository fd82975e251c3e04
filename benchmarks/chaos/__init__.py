"""Random real runs with random faults, each compared with a run without faults."""

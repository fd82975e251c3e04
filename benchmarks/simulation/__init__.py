"""The simulator: its speed, its fidelity, and the comparison with other systems."""

"""Our own policy in full detail, on virtual time: see `simulator.detail.world`."""

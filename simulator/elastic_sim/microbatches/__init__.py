"""Our own policy in full detail, on virtual time: see `elastic_sim.microbatches.world`."""

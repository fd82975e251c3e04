"""Recovery: bring every layer to one version and one ledger from the copies that are left.

All functions are pure functions of the copies in the vaults, the plan and the step records. Their
result is an `Assignment`; workers carry it out and move the bytes
(`elastic.worker.recovery.state_loader`). `elastic.core.job.epoch_change` decides when to recover
and with which plan. Start with the invariants in `recovery`; `solver` makes the choices,
`copy_index` arranges the copies, and `partial_replay` finds the layers that must run a micro-batch
again.
"""

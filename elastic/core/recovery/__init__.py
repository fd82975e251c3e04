"""Recovery: bring every layer to one version and one ledger from the copies that are left.

Everything here is a pure function of the copies in the vaults, the plan and the step records.
It moves no bytes: the result is an `Assignment`, which workers carry out
(`elastic.worker.recovery.state_loader`). It does not choose the plan and does not decide when to
recover; `elastic.core.job.epoch_change` does. Start with the invariants in `recovery`; `solver`
makes the choices, `copy_index` arranges the copies, and `partial_replay` finds the layers that
have to run a micro-batch again.
"""

"""The training step on one worker: schedule, gradient reduction, commit and update.

`step.StepRunner` runs one optimizer step after another; read it first. It uses `stage_runner` and
`stage` to run the schedule's actions, `allreduce` or `incremental_allreduce` to sum gradients over
the holders of a layer, `commit` to agree that every micro-batch is in the sum exactly once, and
`sharded_update` to exchange parameters under a sharded optimizer. `partial` repeats micro-batches
on some layers after a recovery. `injector` carries out injected faults.
The engine executes plans. It decides neither plans nor recoveries, and reads no environment.
"""

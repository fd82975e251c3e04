"""The user's entry point: a training description and the loop over the agent's orders.

    Trainer(stack=..., optimizer=..., data=..., steps=..., microbatches=...).run()

The worker attaches to its agent once and then follows orders. Each `Install` begins an epoch. An
`EpochSession` installs the assigned layers, connects to the other workers, trains until a fault or
a newer epoch, and sends `Halted`. Then `Trainer.run` waits for the next `Install`. The process, its
device and its layers outlive the epoch (`WorkerContext`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from elastic.core.protocol import messages as m
from elastic.domain.errors import ElasticError, FieldError, describe
from elastic.domain.types import Accumulate, JobSpec
from elastic.worker.context import TrainingJob, WorkerContext
from elastic.worker.control.agent_client import WorkerSettings, connect_agent
from elastic.worker.datasets.data_source import DataSource
from elastic.worker.datasets.weighting import WEIGHT, Fields
from elastic.worker.epoch_session import EpochSession
from elastic.worker.evaluation import Evaluation
from elastic.worker.local_training import train_here
from elastic.worker.model.checks import check_callable, description, positive, whole_number
from elastic.worker.model.layers import LayerStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec
from elastic.worker.profiling.measure import measure_job, note_progress
from elastic.worker.profiling.run_profile import select_stack
from elastic.worker.script_exit import begin_training, watch_script
from elastic.worker.transport.device_fault import crash_on_node_fault

STACK = (
    "a LayerStack, as from_sequential(model, loss=loss), from_huggingface(config) or "
    "ListStack([lambda: Layer(8, 64), lambda: Layer(64, 1)], seed=0); "
    "docs/guide/custom-model.md shows how to cut a model into layers"
)
OPTIMIZER = (
    "an OptimizerSpec, as OptimizerSpec(factory=torch.optim.Adam, lr=lambda step: 0.003); "
    "the runtime makes one optimizer per layer"
)
EVALUATION = "Evaluation(data=..., every=100, microbatches=8), imported from elastic"
MOST_MICROBATCHES = 1_000_000
"""Largest number of micro-batches per step; plans and reports list each of them."""

watch_script()


class Trainer:
    """Trains `stack` for `steps` steps of `microbatches` micro-batches, on the available nodes.

    Global batch, sample order, dropout and learning rate do not depend on the number of nodes.
    With `--accumulate exact`, the parameters are independent of that number too, bit for bit.

    Args:
        stack: the model's layers.
        optimizer: optimizer and learning rate schedule.
        data: data(step, index) -> micro-batch `index` of `step`; a function of these two numbers
            alone.
        steps: optimizer steps of the whole training.
        microbatches: micro-batches per step, over all pipelines.
        seed: seed of parameters and dropout.
        tp: workers per tensor-parallel group.
        weight: weight(fields) -> weight of a micro-batch with these fields in the mean over the
            step, as `label_count()`; None: all micro-batches count equally.
        tokens_per_microbatch: for the reported tokens per second; 0 if unknown. With `weight`, the
            expected weight.
        tokens_per_sequence: usual tokens of one sequence, for a stack with `varying=True`: times
            are reported as those of a micro-batch of usual size. 0 if unknown.
        flops_per_microbatch: floating-point operations of the forward and backward pass of a
            micro-batch, for the reported utilisation (MFU); None: as the layers estimate them, or
            unknown with `weight`.
        checkpoint_every: steps between two checkpoints; 0 for none.
        evaluation: when and with which data the model is evaluated; None for never.

    Raises FieldError for an argument that is not usable, and UsageError under torchrun.
    """

    def __init__(
        self,
        *,
        stack: LayerStack,
        optimizer: OptimizerSpec,
        data: Callable[[int, int], Microbatch],
        steps: int,
        microbatches: int,
        seed: int = 0,
        tp: int = 1,
        weight: Callable[[Fields], object] | None = None,
        tokens_per_microbatch: int = 0,
        tokens_per_sequence: int = 0,
        flops_per_microbatch: float | None = None,
        checkpoint_every: int = 0,
        evaluation: Evaluation | None = None,
    ) -> None:
        if not isinstance(stack, LayerStack):
            raise FieldError("stack", description(stack), STACK)
        if not isinstance(optimizer, OptimizerSpec):
            raise FieldError("optimizer", description(optimizer), OPTIMIZER)
        if evaluation is not None and not isinstance(evaluation, Evaluation):
            raise FieldError("evaluation", description(evaluation), EVALUATION)
        source = DataSource(data)
        steps = whole_number("steps", steps, 1)
        microbatches = whole_number("microbatches", microbatches, 1, MOST_MICROBATCHES)
        made_for = getattr(data, "microbatches", None)
        if made_for not in (None, microbatches):
            raise FieldError("microbatches", microbatches, f"{made_for}, as the data was made for")
        seed, tp = whole_number("seed", seed), whole_number("tp", tp, 1)
        checkpoint_every = whole_number("checkpoint_every", checkpoint_every, 0)
        tokens = whole_number("tokens_per_microbatch", tokens_per_microbatch, 0)
        sequence = whole_number("tokens_per_sequence", tokens_per_sequence, 0)
        if sequence > tokens and weight is None:
            remedy = f"at most tokens_per_microbatch, which is {tokens}"
            raise FieldError("tokens_per_sequence", sequence, remedy)
        if flops_per_microbatch is not None:
            flops = positive("flops_per_microbatch", flops_per_microbatch)
        else:  # with weights, `tokens` is a rough figure
            flops = stack.training_flops(tokens) if weight is None else 0.0
        if weight is not None:
            check_callable("weight", weight, 1, WEIGHT)
            if not tokens:
                remedy = "with weight, the expected weight of a micro-batch, as its tokens"
                raise FieldError("tokens_per_microbatch", tokens, remedy)
        self._settings = settings = WorkerSettings.if_in_job()
        if settings is not None and settings.measure:
            note_progress(settings, "waiting for the script to call Trainer.run()")
        stack = stack if settings is None else select_stack(settings, stack)
        optimizer.lr(0)  # raises FieldError for a result that is no number
        accumulate = Accumulate.FAST if settings is None else Accumulate(settings.accumulate)
        spec = JobSpec(
            layers=stack.specs(accumulate, optimizer),
            n_microbatches=microbatches,
            n_steps=steps,
            tp=tp,
            seed=seed,
            tokens_per_microbatch=tokens,
            tied=tuple(
                (group[0][0], owner[0]) for group in stack.tied_trained for owner in group[1:]
            ),
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluation.every if evaluation else 0,
            evaluation_microbatches=evaluation.microbatches if evaluation else 0,
            contents=stack.contents(),
            optimizer=optimizer.describe(),
            flops_per_microbatch=flops,
        )
        self._job = TrainingJob(
            stack=stack,
            optimizer=optimizer,
            data=source,
            accumulate=accumulate,
            spec=spec,
            evaluation=evaluation,
            weigh=weight,
            tokens_per_sequence=sequence,
        )

    def run(self) -> None:
        """Train until the job is done. Under `elastic profile`, measure the layers instead. Without
        `elastic run`, this process trains alone (`elastic.worker.local_training`).

        Raises UsageError if this process has trained before, and SystemExit with the job's exit
        code if the job failed.
        """
        begin_training()
        settings = self._settings
        if settings is None:
            train_here(self._job)
            return
        if settings.measure:
            measure_job(settings, self._job)
            return
        gc.freeze()  # no collection looks at the modules again, neither in a step nor at the end
        context = self._attach(settings)
        left_epoch = 0
        while True:
            order = context.agent.next_order()
            if isinstance(order, m.Stop):
                context.release()
                if order.code:
                    raise SystemExit(order.code)
                return
            if order.epoch > left_epoch:
                with crash_on_node_fault(context.agent.send, settings.local_rank):
                    EpochSession(context, order).run()
                left_epoch = order.epoch

    def _attach(self, settings: WorkerSettings) -> WorkerContext:
        """Attach to the agent. Report an error to the agent; raise SystemExit for an ElasticError,
        which ends the job, else the error, which ends this worker only."""
        rank = settings.local_rank
        try:
            return WorkerContext.attach(settings, self._job)
        except ElasticError as error:
            text = str(error) or type(error).__name__
            connect_agent(settings).send(m.Failed(text, error.exit_code, rank))
            raise SystemExit(error.exit_code) from None
        except Exception as error:
            connect_agent(settings).send(m.Crashed(describe(error), rank))
            raise

"""Item 2: what cannot work is refused, or a line warns."""

from __future__ import annotations

from elastic.domain.errors import EXIT_FAILURE, EXIT_USAGE
from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import CLUSTER, PLAIN, train

ONE = "elastic run --standalone --run-dir run train.py"

CASES = (
    Case(
        item=2,
        title="More pipelines than workers",
        files={"train.py": PLAIN},
        command=Command(
            line="elastic run --standalone --nnodes 2 --pipelines 5 train.py",
            code=EXIT_USAGE,
            shows=("elastic run: --pipelines: '5' is not usable",),
        ),
    ),
    Case(
        item=2,
        title="A shape that the cluster cannot have",
        files={"cluster.toml": CLUSTER},
        command=Command(
            line="elastic plan cluster.toml --shape 99",
            code=EXIT_USAGE,
            shows=("elastic plan: --shape: '99' is not usable",),
        ),
    ),
    Case(
        item=2,
        title="A fault after the last step",
        files={"train.py": train()},
        is_long=True,
        command=Command(
            line='elastic run --standalone --run-dir run --fault "kill node=0 step=3000" train.py',
            code=EXIT_USAGE,
            shows=("--fault step: 3000 is not usable: this job has 6, numbered from 0 to 5",),
        ),
    ),
    Case(
        item=2,
        title="A layer with running averages",
        files={"train.py": train("trainer(middle=Normed).run()")},
        is_long=True,
        command=Command(
            line=ONE,
            code=EXIT_USAGE,
            shows=("BatchNorm1d with running averages is not usable", "use LayerNorm or GroupNorm"),
        ),
    ),
    Case(
        item=2,
        title="`Trainer.run()` twice",
        files={"train.py": train("job = trainer()\njob.run()\njob.run()")},
        is_long=True,
        command=Command(
            line=ONE,
            code=EXIT_FAILURE,
            shows=(
                "all 6 steps done",
                "a script trains once: this process has called Trainer.run() before",
            ),
        ),
    ),
    Case(
        item=2,
        title="A script that never calls `Trainer.run()`",
        files={"train.py": train("trainer()")},
        is_long=True,
        command=Command(line=ONE, shows=("ended without training",)),
    ),
    Case(
        item=2,
        title="Data that is no function of step and index",
        files={"train.py": train("trainer(data=draws).run()")},
        is_long=True,
        command=Command(
            line=ONE,
            code=EXIT_USAGE,
            shows=("data must depend on step and index alone", "seed a torch.Generator from both"),
        ),
    ),
)

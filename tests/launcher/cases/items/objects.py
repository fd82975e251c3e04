"""Item 3: a wrong path or object is one line that says what was given and what is wanted."""

from __future__ import annotations

from elastic.domain.errors import EXIT_USAGE
from tests.launcher.cases.case import Case, Command
from tests.launcher.cases.scripts import PLAIN, train

RUN = "elastic run --standalone --run-dir run train.py"


def _wrong_object(title: str, statement: str, shows: str) -> Case:
    """Return the case of a script whose last line is `statement`, which must end with 2."""
    return Case(
        item=3,
        title=title,
        files={"train.py": train(statement)},
        is_long=True,
        command=Command(line=RUN, code=EXIT_USAGE, shows=(shows,)),
    )


CASES = (
    Case(
        item=3,
        title="A run directory that cannot be made",
        files={"train.py": PLAIN},
        command=Command(
            line="elastic run --standalone --run-dir /proc/x train.py",
            code=EXIT_USAGE,
            shows=("elastic run: --run-dir: '/proc/x' is not usable", "give another"),
        ),
    ),
    Case(
        item=3,
        title="A directory of certificates that cannot be made",
        command=Command(
            line="elastic certs --out /proc/x",
            code=EXIT_USAGE,
            shows=("elastic certs: --out: '/proc/x' is not usable", "give another"),
        ),
    ),
    _wrong_object(
        "A module as `stack`",
        "trainer(stack=Loss(4, 4)).run()",
        "stack: an object of type Loss is not usable: a LayerStack",
    ),
    _wrong_object(
        "Modules instead of builders",
        "trainer(middle=Layer(4, 4)).run()",
        "builders[1]: an object of type Layer is not usable: each entry",
    ),
    _wrong_object(
        "A torch optimizer instead of a spec",
        "trainer(optimizer=torch.optim.Adam(Layer(4, 4).parameters())).run()",
        "optimizer: an object of type Adam is not usable: ",
    ),
    _wrong_object(
        "A learning rate that is a number",
        "trainer(optimizer=OptimizerSpec(factory=torch.optim.SGD, lr=3e-3)).run()",
        "OptimizerSpec.lr: 0.003 is not usable: a function of the step",
    ),
    _wrong_object(
        "A `DataLoader` as data",
        "trainer(data=torch.utils.data.DataLoader([1, 2])).run()",
        "data: an object of type DataLoader is not usable: ",
    ),
    _wrong_object(
        "Data that is a dict",
        "trainer(data=lambda step, index: {'x': 1}).run()",
        "an object of type dict is not usable: data must return Microbatch(step, index",
    ),
    _wrong_object(
        "A loss that is a vector",
        "trainer(last=lambda: Vector(4, 4)).run()",
        "layer 2 (Vector): a tensor of shape (2,) and type float32 is not usable: ",
    ),
    _wrong_object(
        "LBFGS",
        "trainer(optimizer=OptimizerSpec(factory=torch.optim.LBFGS, lr=lambda step: 1.0)).run()",
        "OptimizerSpec.factory: LBFGS, whose step fails with TypeError",
    ),
    _wrong_object(
        "A layer that returns a tensor and a number",
        "trainer(middle=lambda: Pair(4, 4)).run()",
        "layer 1 (Pair)",
    ),
    Case(
        item=3,
        title="A profile of a script that makes no Trainer",
        files={"plain.py": PLAIN},
        command=Command(
            line="elastic profile plain.py",
            code=EXIT_USAGE,
            shows=("it made no Trainer; give a script that uses elastic",),
        ),
    ),
)

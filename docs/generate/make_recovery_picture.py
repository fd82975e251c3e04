"""Draw docs/recovery.svg from a real run: python docs/generate/make_recovery_picture.py [RUN_DIR]

Without RUN_DIR the script trains a small GPT on four local nodes and kills one of them. The
picture shows the pipeline before and after the loss, the kept and the repeated micro-batches,
and the seconds of each phase. All values come from the run's events.jsonl.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from elastic.domain.types import Pipeline, Plan
from elastic.planning.plan.plan import parse_plan
from elastic.telemetry import read_events

OUT = Path(__file__).parents[1] / "recovery.svg"
RUN = (
    "run", "--standalone", "--nnodes", "4", "--pipelines", "1",
    "--fault", "kill node=2 step=8 microbatch=5", "-m", "examples.train_gpt", "--steps", "12",
)  # fmt: skip
BLUE, ORANGE, GREEN, GREY, INK = "#0072b2", "#d55e00", "#009e73", "#9aa0a6", "#24292f"
PHASES = ("detect", "decide", "transfer", "rebuild", "total")


def main(words: list[str]) -> int:
    """Draw the first recovery of a run."""
    if words:
        draw(Path(words[0]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "elastic", RUN[0], "--run-dir", str(run_dir), *RUN[1:]]
        subprocess.run(command, check=True)
        draw(run_dir)
    return 0


def draw(run_dir: Path) -> None:
    """Write OUT. Raises StopIteration if nothing failed in the run."""
    events = read_events(run_dir / "events.jsonl")
    plans = [event for event in events if event["kind"] == "plan"]
    recovery = next(e for e in events if e["kind"] == "recovery" and not e["planned"])
    number = next(i for i, event in enumerate(plans) if event["epoch"] == recovery["epoch"])
    before, after = parse_plan(plans[number - 1]["text"]), parse_plan(plans[number]["text"])
    mpl.rcParams.update({"svg.hashsalt": "recovery", "svg.fonttype": "none", "font.size": 11})
    figure = Figure(figsize=(10, 4.3))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 100), ylim=(0, 43))
    axes.axis("off")
    nodes = before.nodes()
    columns = {node: 16 + i * 84 / len(nodes) for i, node in enumerate(nodes)}
    pipeline(axes, before.pipelines[0], columns, 31, lost=set(nodes) - set(after.nodes()))
    copies(axes, before, after, columns)
    pipeline(axes, after.pipelines[0], columns, 14, moved=moved(before, after))
    axes.text(1, 34, "before", fontsize=13, weight="bold", color=INK)
    axes.text(1, 17, "after", fontsize=13, weight="bold", color=INK)
    microbatches(axes, after.n_microbatches, sum(map(len, plans[number]["todo"])))
    seconds = ", ".join(f"{phase} {recovery[f'{phase}_s']:.2f}" for phase in PHASES)
    axes.text(1, 1.2, f"Seconds from the kill to the next micro-batch: {seconds}", color=INK)
    figure.savefig(OUT, metadata={"Date": None})


def moved(before: Plan, after: Plan) -> set[tuple[str, int]]:
    """Each (node, layer) that is new on its node."""
    held = {(st.unit.node, layer) for _, _, st in before.stages() for layer in st.layers}
    return {(s.unit.node, n) for _, _, s in after.stages() for n in s.layers} - held


def pipeline(
    axes: Axes,
    shown: Pipeline,
    columns: dict[str, float],
    y: float,
    *,
    lost: Collection[str] = (),
    moved: Collection[tuple[str, int]] = (),
) -> None:
    """One box per stage, one cell per layer, an arrow between neighbours."""
    places = [(stage.unit.node, tuple(stage.layers)) for stage in shown.stages]
    for node, layers in places:
        x, gone = columns[node], node in lost
        edge = ORANGE if gone else INK
        axes.add_patch(
            FancyBboxPatch(
                (x, y), 15, 8, boxstyle="round,pad=0.2", facecolor="white", edgecolor=edge,
                linewidth=2 if gone else 1.2, linestyle="--" if gone else "-",
            )
        )  # fmt: skip
        label = f"{node}, killed" if gone else node
        axes.text(x + 7.5, y + 6, label, ha="center", color=edge, weight="bold")
        for place, layer in enumerate(layers):
            left = x + 7.5 + (place - len(layers) / 2) * 4.6
            colour = ORANGE if gone else GREEN if (node, layer) in moved else BLUE
            axes.add_patch(FancyBboxPatch((left + 0.3, y + 0.9), 3.6, 3.4, facecolor=colour,
                                          edgecolor="none", boxstyle="round,pad=0.1"))  # fmt: skip
            axes.text(left + 2.1, y + 1.9, str(layer), ha="center", color="white", weight="bold")
    for (one, _), (other, _) in pairwise(places):
        axes.annotate("", (columns[other] - 0.4, y + 4), (columns[one] + 15.4, y + 4),
                      arrowprops={"arrowstyle": "->", "color": INK})  # fmt: skip


def copies(axes: Axes, before: Plan, after: Plan, columns: dict[str, float]) -> None:
    """An arrow from the peer that keeps copies of a lost node to each new holder of a layer."""
    for node in sorted(set(before.nodes()) - set(after.nodes())):
        keeper = columns[dict(before.peers)[node]] + 7.5
        axes.text(keeper, 28.2, f"copies of {node} in memory here", ha="center", color=GREEN)
        layers = {n for _, _, st in before.stages() if st.unit.node == node for n in st.layers}
        for holder in sorted({new for new, layer in moved(before, after) if layer in layers}):
            axes.annotate("", (columns[holder] + 8, 22.8), (keeper, 27.4),
                          arrowprops={"arrowstyle": "->", "color": GREEN,
                                      "linewidth": 2})  # fmt: skip


def microbatches(axes: Axes, total: int, repeated: int) -> None:
    """One square per micro-batch of the interrupted step."""
    axes.text(1, 8.6, "micro-batches of the step:", color=INK)
    for index in range(total):
        again = index >= total - repeated
        colour = ORANGE if again else GREY
        axes.add_patch(FancyBboxPatch((27 + index * 3.4, 7.6), 2.2, 2.6, facecolor=colour,
                                      edgecolor="none", boxstyle="round,pad=0.1"))  # fmt: skip
        axes.text(28.1 + index * 3.4, 8.3, str(index), ha="center", color="white", fontsize=9)
    text = f"{total - repeated} finished and kept, {repeated} run again"
    axes.text(30 + total * 3.4, 8.6, text, color=INK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

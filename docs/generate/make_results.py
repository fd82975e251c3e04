"""Write docs/results.md and the results in README.md: python docs/generate/make_results.py

Both come from benchmarks/results/*.json. Every row that has a target is printed, also if it was
missed. Rows without a target are printed where a `Section` asks for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results -->", "<!-- /results -->"
WIDTH = 100

Row = dict[str, Any]
"""One row of a result file, as `benchmarks.results.Row`."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """How the page shows one benchmark."""

    name: str
    """Name of the module in benchmarks/ or a folder there, and of the result file."""
    title: str
    context: str
    """What was measured and how: one or two sentences, wrapped at 100 columns."""
    rows: str = "$^"
    """Regular expression: metrics without a target that are listed too."""
    pivots: tuple[tuple[str, str], ...] = ()
    """(heading of the first column, pattern with the groups `row` and `column`), one per table."""
    shorten: tuple[tuple[str, str], ...] = ()
    """Replacements in metric names, for words that `context` already says."""
    units: tuple[tuple[str, str], ...] = ()
    """(pattern of the metric, unit) for values that the result file gives without a unit."""
    summarize: bool = False
    """Print how many targets are met instead of one row per target."""


SECTIONS = (
    Section(
        name="recovery",
        title="Recovery",
        context="""\
Time without training after a loss. The benchmark trains the example GPT on four local nodes in one
pipeline with `--backup auto`, which takes `stream+snapshot` here. It kills one node (SIGKILL)
before a backward pass, and repeats this 20 times. The total is the time from the kill to the next
computed micro-batch; it includes waits between the [phases](guide/summary.md#recoveries). `decide`
includes `halt`. Allowed replays per kill: the micro-batches in flight on the lost stage, and one
more.""",
        rows="(median|total, .*|micro-batches replayed, max)$",
        units=(("kills", "kills"), ("micro-batches", "micro-batches")),
    ),
    Section(
        name="recovery_by_scheme",
        title="Recovery by backup scheme",
        context="""\
Time of one recovery per scheme, on links of 1 Gbit/s. `replica` rows have two pipelines, the others
one. Layers wait 5 ms in each forward and backward pass instead of computing; states, gradients and
messages are real. Models have 1.6 (x1), 6.4 (x4) and 25.6 (x16) million parameters.""",
        pivots=(("scheme", r"recovery, (?P<row>\S+), (?P<column>.*)"),),
    ),
    Section(
        name="local_recovery",
        title="Local recovery",
        context="""\
Cost of a kill to pipelines that lost nothing, in steps of about 20 s: eight emulated nodes, whose
layers wait instead of computing. One node of the second pipeline is killed when its pipeline has
done a quarter, a half and three quarters of its micro-batches. "Cost" is the time that an undamaged
pipeline needs for its own micro-batches, beyond that in the steps before. "Other version" is
4ff64e07, in which each loss halts all nodes; both ran in turns.""",
        rows="pipelines, ",
    ),
    Section(
        name="compare",
        title="Beside other systems",
        context="""\
The same work on one machine, one system after the other: `make compare`. Four nodes train a small
network, 16 micro-batches of 0.1 s per step for 48 steps. A node is killed (SIGKILL) in the middle
of a step, twice, and replaced after 5 s. The other systems keep a replica of the model per node;
torchft goes on with a smaller batch, torchrun 2.13 and NVRx 0.4.1 restart all workers from a
checkpoint. "Tuned" is what their documents offer; `benchmarks/compare/systems.py` lists it.
torchrun has `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in both settings, without which torch 2.13
admits no replaced node. "Work" is the time from a kill to the next useful micro-batch, "new step"
to the next step that was not committed before: the longer one of two kills. "Longer" is what a kill
adds to the run, "lost" micro-batches that are computed again per kill, "small" the steps with a
smaller batch. The last two columns are the final loss. Restarts contain the start of Python and
torch, a few seconds here.""",
        pivots=(("system", r"(?P<row>\S+, (?:defaults|tuned)): (?P<column>.*)"),),
        shorten=(
            ("usual step", "step"),
            ("next useful work after a kill", "work"),
            ("next new step after a kill", "new step"),
            ("longer per kill", "longer"),
            ("micro-batches lost per kill", "lost"),
            ("steps with a smaller batch", "small"),
            ("final loss, without kills", "loss"),
            ("final loss, with kills", "after kills"),
        ),
    ),
    Section(
        name="backup_overhead",
        title="Backup overhead",
        context="""\
Cost of backups without failures: four nodes, 512 tokens per micro-batch. One job trains while its
backup is switched on and off in blocks of steps. Times are ratios to the same job without backup;
"exposed" is the time per step in which a worker's main thread copied or waited; "sent" is the
traffic of all nodes per step.""",
        pivots=(
            (
                "scheme, pipelines",
                r"(?P<column>step time|processor time|exposed|sent)(?: in a step)?, "
                r"(?P<row>.*pipelines?)",
            ),
        ),
        shorten=(
            (" / off", ""),
            ("4 nodes, ", ""),
            (", 512 tokens a micro-batch", ""),
            ("step time, reduce+replica / ", "reduce+replica over "),
        ),
        units=(("step time|processor time|reduce", "x"),),
    ),
    Section(
        name="backup_choice",
        title="Choice of the backup scheme",
        context="""\
Expected step time of the pair that `--backup auto` takes, in percent above the best pair. It is the
measured step time and the cost of losses at the rate of AWS P3 spot instances (0.61 per node-hour).
Every pair runs on four nodes with links slowed by `--link`. Columns: number of pipelines, and
micro-batches of 15 ms (short) or 150 ms (long) per stage.""",
        pivots=(("link", r"auto over the best pair, (?P<row>\w+bit)/(?P<column>.*)"),),
    ),
    Section(
        name="compression",
        title="Compression of copies",
        context="""\
Lossless compression with bit shuffle and LZ4 on one core, in pieces of 1 MiB, of the bytes that the
example GPT's vaults would send. Ratio: original divided by compressed bytes. Packed and unpacked:
original bytes per second of compressing and of restoring them. The last column is the link speed
below which compression pays.""",
        pivots=(
            (
                "copy",
                "(?P<row>[^:]+): (?:blosc bit shuffle lz4, )?"
                "(?P<column>ratio|packed|unpacked|pays on links below)",
            ),
        ),
    ),
    Section(
        name="vault",
        title="Vault throughput",
        context="""\
One copy of 64 MiB at a time between two processes of one machine, from and to ordinary memory,
checksums included. Ratios: throughput of writing to a vault (put) and of reading from it (get),
divided by the throughput of a bare socket; medians over turns in which the socket comes first.
[Transport between vaults](#transport-between-vaults) has more sizes and a stricter comparison.""",
        rows="publish|fetch",
    ),
    Section(
        name="vault_transport",
        title="Transport between vaults",
        context="""\
Throughput of the whole path of a copy from a worker's shared memory to another vault (checksum,
slot in shared memory, acknowledgement), and its ratio to that of a plain socket on loopback. The
two take turns, and either comes first. The row of a state that is read gives a ratio of times.""",
        rows=": vault$",
        shorten=(("shared memory / peer", "time from shared memory / from a peer"),),
    ),
    Section(
        name="engine",
        title="Pipeline engine",
        context="""\
Step time of the engine against `Schedule1F1B` of torch.distributed.pipelining, with the same
processes, layers, cuts and micro-batches over gloo. Both take turns step by step; the speed is the
median over pairs.""",
        rows="step",
    ),
    Section(
        name="planner",
        title="Planner",
        context="""\
Time to make a plan (median of 5); gap, which is the step time of the plan above a proven lower
bound, on random clusters of mixed device types; and step time of models of rival planners on 313
cases, all priced by one cost model. The second table gives the time to make a plan by number of
nodes, from one measurement each. Planning for up to 128 nodes tries more plans.""",
        rows="gap|least|greatest",
        pivots=(("nodes", "growth: (?P<row>[0-9,]+ )(?P<column>equal nodes|nodes of 3 types)"),),
        shorten=(
            (
                "gap to the lower bound, 100 random mixed clusters of 64 to 512 nodes",
                "gap, 100 clusters",
            ),
            ("gap, 10 clusters with links of", "gap, 10 clusters, links of"),
            (
                "drawn clusters that are too small",
                "random clusters rejected because the model does not fit",
            ),
        ),
        units=(("cases", "cases"), ("too small", "clusters")),
    ),
    Section(
        name="prediction",
        title="Predicted step time",
        context="""\
The cost model's prediction against the real engine for 12 plans (1 to 3 pipelines, depth 1 to 6,
all schedules). Compute is emulated; messages, sums and backups are real. Three other runs measure
the fixed costs of the engine, which the prediction uses.""",
        rows="engine",
        shorten=(
            ("engine: a message between stages", "fixed cost of the engine per message"),
            (
                "engine: a layer, each micro-batch",
                "fixed cost of the engine per layer and micro-batch",
            ),
            ("engine: a step", "fixed cost of the engine per step"),
        ),
    ),
    Section(
        name="coordinator",
        title="Coordinator load",
        context="""\
One coordinator, pinned to one core, with 100 to 2,000 simulated agents on the other core and a
model of 96 layers. The targets apply to the column of 2,000 agents. The halt is the coordinator's
decision to stop all nodes after a loss. Silence begins with the last message of the lost agent. In
the second table, all messages use mutual TLS, and the state is in three etcd servers.
Ticks are the periodic checks of the coordinator.""",
        pivots=(
            ("agents", "(?P<column>[0-9]+) agents: (?P<row>.*)"),
            (
                "agents, mutual TLS and etcd",
                "(?P<column>[0-9]+) agents, mutual TLS and etcd: (?P<row>.*)",
            ),
        ),
        units=(("share of a core", "core"), ("told", "agents"), ("CPU an agent", "x")),
        shorten=(
            ("share of a core", "CPU"),
            (", just after a change", ", after a change"),
            ("living agents told that they are lost", "wrongly declared lost"),
            ("closed connection to the halt", "connection closed to halt"),
            ("silence to the halt", "silence to halt"),
            ("agents' own heartbeats late by, max", "agents' heartbeats late, max"),
            ("looks at the time late by, mean", "ticks late, mean"),
        ),
    ),
    Section(
        name="failover",
        title="Takeover by another coordinator",
        context="""\
Time without a leader. Three coordinators use a real etcd; the leader is killed (SIGKILL) or paused
(SIGSTOP) again and again while a small job trains. The times end at the successor's first decisions
and at the first step that a node reports to it.""",
        rows=".",
        units=(("nodes", "nodes"), ("epoch", "changes")),
    ),
    Section(
        name="partial_partitions",
        title="Partial partitions",
        context="""\
Two of four nodes cannot reach each other, and both reach the coordinator. Each node is a network
namespace. All 216 cases: six pairs; one direction, the other or both; a blackhole route or a silent
drop by the switch; cut during training, reduction, commit, halting, installing or joining. Training
must go on within 10 s and a step; once the path is well, all nodes are used again and the
parameters are those of a run without a fault.""",
        rows="longest time",
    ),
    Section(
        name="chaos",
        title="Random runs with random faults",
        context="""\
Real runs of 3 to 6 local nodes with random shapes, backup schemes and schedules, each with one to
four faults at random points; a third of them in network namespaces. A run is right if it ends with
the parameters of a run without faults, bit for bit, and with all due checkpoints, whose files are
read. It may refuse with exit code 3 if all copies of a layer were destroyed before the first
checkpoint. A partition mutes the agent on one machine, and pulls a cable in network namespaces. The
result file has the seed, the faults and the outcome of each run.""",
        rows="^runs|^recoveries|^faults",
        units=(("^runs", "runs"), ("^faults", "faults"), ("^nodes", "nodes")),
    ),
    Section(
        name="soak",
        title="Soak",
        context="""\
Training beside busy processes with a fault every 20 s. Each figure of a process, or of the job, is
compared between the second and the last quarter of the samples. A fault whose victim did not run is
not counted. The load includes other programs: in the recorded hour, the test suite and two
simulations. Three of the soak's own processes were stopped then.""",
        rows="^minutes|^busy|^load|^faults|^steps|^longest|^recoveries|^event",
        units=(("processes$", "processes"), ("^faults", "faults"), ("^steps", "steps")),
    ),
    Section(
        name="simulator",
        title="Simulator speed",
        context="""\
Time to simulate 11 hours of 32 nodes with all policies, and 30 days of 1,000 nodes with the policy
`ours`. The next seed finds some plans of the first one in a cache. The module `elastic_sim.cli` was
named `simulator.cli` when this was measured.""",
        rows="per event|import",
    ),
    Section(
        name="fidelity",
        title="Fidelity of the simulator",
        context="""\
Micro-batch level of the simulator against real runs with emulated compute: 3 runs calibrate it, 3
others with other faults are predicted. Errors compare means over all predicted runs. An unmatched
recovery happens only in the run or only in its simulation. The second table has the errors of the
phases of [recoveries](guide/summary.md#recoveries).""",
        rows="^throughput",
        pivots=(("phase", "(?P<column>losses|planned changes): (?P<row>[a-z]+), mean: error"),),
        units=(("recoveries", "recoveries"),),
    ),
    Section(
        name="headline",
        title="Comparison with rivals",
        context="""\
Simulated throughput of this runtime and of models of its rivals on recorded spot traces and at
five failure rates. A difference is significant if the 95 % interval of the ratio of samples does
not contain 1. The target of each scenario is at least as many samples as the best rival. The 8
scenarios on the p3 trace have a second target: at least 0.95 of the oracle's samples. [All
scenarios](simulator/headline.md).""",
        rows="^scenarios",
        shorten=(
            (
                "scenarios in which ours is undecided",
                "scenarios without a significant difference",
            ),
            ("scenarios in which ours is ", "scenarios in which this runtime is "),
        ),
        summarize=True,
    ),
)


def met(row: Row) -> bool:
    higher = row["better"] == "higher"
    return bool(row["value"] >= row["target"] if higher else row["value"] <= row["target"])


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def target(row: Row, *, verdict: bool = True) -> str:
    """Such as "at most 3: met"; empty without a target."""
    if row["target"] is None:
        return ""
    sign = "at most" if row["better"] == "lower" else "at least"
    result = (": met" if met(row) else ": **missed**") if verdict else ""
    return f"{sign} {row['target']:g}{result}"


def measured(section: Section, row: Row) -> str:
    """Value and unit."""
    unit = row["unit"]
    if not unit:
        unit = next(
            (unit for pattern, unit in section.units if re.search(pattern, row["metric"])), ""
        )
    return f"{number(row['value'])} {unit}".rstrip()


def short(section: Section, metric: str) -> str:
    for old, new in section.shorten:
        metric = metric.replace(old, new)
    return metric


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Raises ValueError for a row over 100 columns: `Section.shorten` shortens names."""
    lines = [head, ["---"] * len(head), *rows]
    text = [f"| {' | '.join(line)} |" for line in lines]
    for line in text:
        if len(line) > WIDTH:
            raise ValueError(f"over {WIDTH} columns, add a replacement to its section: {line}")
    return "\n".join(text) + "\n"


def pivot_table(section: Section, title: str, found: Sequence[tuple[re.Match[str], Row]]) -> str:
    """One table for several rows. A target that all of them share stands below it."""
    names = list(dict.fromkeys(match["row"].strip() for match, _ in found))
    columns = list(dict.fromkeys(match["column"] for match, _ in found))
    shared = len({(row["target"], row["better"], row["unit"]) for _, row in found}) == 1
    lines = []
    for name in names:
        cells = {match["column"]: row for match, row in found if match["row"].strip() == name}
        goals = {target(row) for row in cells.values()}
        for_all = len(goals) == 1
        label = f"{name} ({goals.pop()})" if for_all and not shared and goals != {""} else name
        line = [label]
        for column in columns:
            text = measured(section, cells[column]) if column in cells else ""
            goal = target(cells[column]) if column in cells and not for_all else ""
            line.append(f"{text} ({goal})" if goal else text)
        lines.append([cell.replace("at most", "≤").replace("at least", "≥") for cell in line])
    text = markdown_table([title, *columns], lines)
    rows = [row for _, row in found]
    if shared and rows[0]["target"] is not None:
        good = sum(map(met, rows))
        unit = rows[0]["unit"]
        goal = f"{target(rows[0], verdict=False)} {unit}".rstrip()
        text += f"\nTarget for each value: {goal}; met by {good} of {len(rows)}.\n"
    return text


def section_text(section: Section, rows: Sequence[Row]) -> str:
    shown: set[str] = set()
    tables = []
    for title, pattern in section.pivots:
        found = []
        for row in rows:
            match = re.fullmatch(pattern, short(section, row["metric"]))
            if match:
                found.append((match, row))
                shown.add(row["metric"])
        if found:
            tables.append(pivot_table(section, title, found))
    rest = [row for row in rows if row["metric"] not in shown]
    goals = [row for row in rest if row["target"] is not None]
    if section.summarize:
        listed = [
            row for row in rest if row["target"] is None and re.search(section.rows, row["metric"])
        ]
    else:
        listed = [row for row in rest if row in goals or re.search(section.rows, row["metric"])]
    if listed:
        lines = [
            [short(section, row["metric"]), measured(section, row), target(row)] for row in listed
        ]
        tables.insert(0, markdown_table(["measured", "result", "target"], lines))
    if section.summarize:
        tables.append(f"Targets met: {sum(map(met, goals))} of {len(goals)}.\n")
    folder = ROOT / "benchmarks"
    found = [*folder.rglob(f"{section.name}.py"), *folder.rglob(f"{section.name}/__main__.py")]
    path = found[0].parent if found[0].stem == "__main__" else found[0]
    module = path.relative_to(ROOT)
    command = f"`python -m {'.'.join(module.with_suffix('').parts)}`"
    return "\n".join(
        (f"## {section.title}\n", f"{section.context}\n", f"Rerun: {command}.\n", *tables)
    )


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/results.md. Raises KeyError for a result file without a section."""
    missing = sorted(results.keys() - {section.name for section in SECTIONS})
    if missing:
        raise KeyError(f"no section in make_results.py for {', '.join(missing)}")
    goals = [
        row for result in results.values() for row in result["rows"] if row["target"] is not None
    ]
    machines = "; ".join(dict.fromkeys(str(result["machine"]) for result in results.values()))
    head = f"""\
# Results

This page gives the measured figures of the runtime, missed targets included. For example, after
{example(results)}.

- Machine: {machines}. Nodes are groups of
  processes on this machine. Nothing here was measured over a real network, or on a GPU: see
  [runs on a GPU](design/gpu.md).
- {sum(map(met, goals))} of {len(goals)} targets are met.
- `make bench` measures everything again, but for the random runs and the soak, which take hours:
  `make chaos-runs` and `make fault-soak`. The result files in `benchmarks/results/` have all rows;
  `python docs/generate/make_results.py` writes this page from them.
- Terms: [glossary](glossary.md).
"""
    parts = [section_text(s, results[s.name]["rows"]) for s in SECTIONS if s.name in results]
    return "\n".join((head, *parts))


def value(results: dict[str, dict[str, Any]], name: str, begin: str, part: str = "") -> float:
    """Return the value of the first row of `name` whose metric begins with `begin` and contains
    `part`. Raises KeyError if there is none."""
    for row in results[name]["rows"]:
        if row["metric"].startswith(begin) and part in row["metric"]:
            return float(row["value"])
    wanted = f"begins with {begin!r}" + (f" and contains {part!r}" if part else "")
    raise KeyError(f"benchmarks/results/{name}.json has no metric that {wanted}")


def example(results: dict[str, dict[str, Any]]) -> str:
    seconds = value(results, "recovery", "total, median")
    text = "one of four nodes is killed, training continues within"
    return f"{text} {seconds:.2g} s (median of 20 kills)"


def readme_block(results: dict[str, dict[str, Any]]) -> str:
    """The results in README.md: seven bullets with links."""

    def get(name: str, begin: str) -> float:
        return value(results, name, begin)

    gap = "gap to the lower bound, 100 random mixed clusters of 64 to 512 nodes: "
    counts = {
        w: get("headline", f"scenarios in which ours is {w}")
        for w in ("ahead", "undecided", "behind")
    }
    total = get("recovery", "total, median")
    (one, low, high), (two, low2, high2) = (
        [
            value(results, "backup_overhead", f"{begin}, auto ", pipelines)
            for begin in ("step time", "quarter of 30 pairs below", "quarter of 30 pairs above")
        ]
        for pipelines in ("1 pipeline", "2 pipelines")
    )
    speed = get("engine", "4 stages: speed")
    plan = get("planner", "1,024 nodes of 3 types")
    again = get("planner", "re-plan after one loss, 1,024 nodes of 3")
    median, worst = get("planner", gap + "median"), get("planner", gap + "worst")
    wait = "next new step after a kill"
    ours, torchft = (
        get("compare", f"{one}: {wait}") for one in ("ours, defaults", "torchft, tuned")
    )
    restart = min(get("compare", f"{one}, tuned: {wait}") for one in ("torchrun", "nvrx"))
    slower = get("compare", "ours, defaults: usual") / get("compare", "torchft, tuned: usual")
    error, largest = get("prediction", "median error"), get("prediction", "worst error")
    return f"""\
- After one of four local nodes is killed, training continues within {total:.2f} s, the median of
  20 kills ([recovery](docs/results.md#recovery)).
- Four systems did the same work, and their nodes were killed. The next new step came {ours:.1f} s after a kill here,
  {torchft:.1f} s with torchft, {restart:.0f} s or more with torchrun and NVRx. Our steps were {100 * (slower - 1):.0f} % longer ([details](docs/results.md#beside-other-systems)).
- With the backups that `auto` chooses, a step takes {one:.2f} times as long as without: a median of 30 pairs, half
  of them between {low:.2f} and {high:.2f}. With two pipelines it is {two:.2f} ({low2:.2f} to {high2:.2f}; [overhead](docs/results.md#backup-overhead)).
- The engine is {speed:.2f} times as fast as torch's `Schedule1F1B` ([engine](docs/results.md#pipeline-engine)).
- The planner takes {plan:.2g} s for 1,024 nodes of three types and {again:.2g} s after a loss; its plans
  are {median:.1f} % (median) to {worst:.1f} % (worst) above a proven bound ([planner](docs/results.md#planner)).
- Predicted step times are off by {error:.1f} % (median) and {largest:.1f} % (worst of 12 plans; [prediction](docs/results.md#predicted-step-time)).
- In simulation this runtime trains more samples than the best modelled rival in {counts["ahead"]:.0f} of
  {sum(counts.values()):.0f} scenarios and fewer in {counts["behind"]:.0f} ([comparison](docs/simulator/headline.md)).
"""  # noqa: E501


def updated(readme: str, block: str) -> str:
    """Return `readme` with `block` between its marks BEGIN and END."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{block}{END}{after}"


if __name__ == "__main__":
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    found = {str(one["name"]): one for one in (json.loads(file.read_text()) for file in files)}
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(), readme_block(found)))
    (ROOT / "docs" / "results.md").write_text(page(found))

"""The console of `--log-format json`: each line is a JSON object, whatever a service prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.console import Console
from elastic.launcher.run.json_lines import JsonLines
from elastic.logs import LogSource
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[3]


def objects(text: str) -> list[dict[str, Any]]:
    """The lines, each of which is an object with all fields."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert one.keys() >= {"time", "level", "job", "node", "epoch", "logger", "message"}, one
    return found


def test_every_line_is_an_object(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "console", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    source, agent = LogSource("demo", "launcher"), LogSource("demo", "node0")
    view = JsonLines(Console((descriptor, descriptor), "elastic", source), source)
    view.note("warning: a note")
    view.update({"step": 3, "steps": 9, "loss": 2.5, "epoch": 7, "phase": "running"})
    torn = agent.line("torn", logger="elastic.agent")
    with view.output_of("node0") as output:
        os.write(output, torn[:50])
    with view.output_of("node1") as other:
        os.write(other, b"Fatal Python error: Segmentation fault\n\n{not json}\nhalf a line")
    far = LogSource("demo", "node7").line("whole", logger="elastic.agent")
    view.put("node7", far[:9])
    view.put("node8", b"from another machine\nand its rest")
    view.put("node7", far[9:])
    view.close()
    os.close(descriptor)
    found = objects((tmp_path / "console").read_text())
    by_text = {one["message"]: one for one in found}
    assert by_text["a note"]["level"] == "warning"
    step = by_text["step 3/9: loss 2.5000"]
    assert (step["epoch"], step["node"], step["job"]) == (7, "launcher", "demo")
    for text in ("Fatal Python error: Segmentation fault", "{not json}", "half a line"):
        assert (by_text[text]["logger"], by_text[text]["node"]) == ("output", "node1")
    assert by_text["whole"]["logger"] == "elastic.agent"
    for text in ("from another machine", "and its rest"):
        assert (by_text[text]["logger"], by_text[text]["node"]) == ("output", "node8")
    assert any(text.startswith('{"time"') for text in by_text), "a torn object is a message"


def test_lines_of_services_are_not_mixed(tmp_path: Path) -> None:
    """Each line is longer than what a pipe takes at once."""
    descriptor = os.open(tmp_path / "console", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    source = LogSource("demo", "launcher")
    view = JsonLines(Console((descriptor, descriptor), "elastic", source), source)
    code = (
        "import json, sys\n"
        "for n in range(20):\n"
        "    print(json.dumps({'time': '', 'level': 'info', 'job': '', 'node': sys.argv[1],"
        " 'epoch': n, 'logger': '', 'message': 'x' * 50_000}))\n"
    )
    children = []
    for name in ("a", "b", "c"):
        with view.output_of(name) as output:
            command = [sys.executable, "-c", code, name]
            children.append(subprocess.Popen(command, stdout=output))
    for child in children:
        assert child.wait(LONG_S) == 0
    view.close()
    os.close(descriptor)
    found = objects((tmp_path / "console").read_text())
    for name in ("a", "b", "c"):
        assert [one["epoch"] for one in found if one["node"] == name] == list(range(20))


@pytest.mark.slow
def test_a_run_prints_only_objects(tmp_path: Path) -> None:
    """A real job: services, progress, and a script that prints to both streams and fails once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "print('from the script')\n"
        'print(\'{"looks": "like JSON"}\', file=sys.stderr)\n'
        "raise ValueError('no data')\n"
    )
    command = [
        sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", "2",
        "--log-format", "json", "--run-dir", str(tmp_path / "run"), str(script),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr == "", done.stderr
    found = objects(done.stdout)
    assert {one["node"] for one in found} >= {"node0", "node1", "coordinator", "launcher"}
    job = json.loads((tmp_path / "run" / "config.json").read_text())["job_id"]
    assert {one["job"] for one in found} == {job}
    said = [one for one in found if one["message"] == "from the script"]
    assert said and {(one["logger"], one["stream"]) for one in said} == {("script", "stdout")}
    assert {one["rank"] for one in said} == {0, 1}
    errors = [one for one in found if one["message"] == '{"looks": "like JSON"}']
    assert errors and {one["stream"] for one in errors} == {"stderr"}
    logged = [one for one in found if one["logger"] == "elastic.coordinator"]
    assert any(isinstance(one["epoch"], int) for one in logged)
    assert any("no data" in one["message"] for one in found if one["node"] == "launcher")

"""GPUs of local nodes."""

from __future__ import annotations

import pytest

from elastic.launcher.flags.local_gpus import VISIBLE, node_environment, visible_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1, 2", ["0", "1", "2"]), ("GPU-a1,GPU-b2", ["GPU-a1", "GPU-b2"]), ("", []), ("-1", [])],
)
def test_the_variable_tells_the_gpus(visible: str, expected: list[str]) -> None:
    assert visible_gpus({VISIBLE: visible}) == expected


@pytest.mark.parametrize(
    ("gpus", "nproc", "expected"),
    [
        ("4,5,6,7", 1, ["4", "5", "6", "7"]),
        ("0,1,2,3", 2, ["0,1", "2,3", "0,1", "2,3"]),
        ("0", 1, ["0", "0", "0", "0"]),
        ("0,1", 4, ["0,1", "0,1", "0,1", "0,1"]),
        ("0,1,2", 2, ["0,1", "2,0", "1,2", "0,1"]),
    ],
)
def test_each_local_node_has_gpus_of_its_own_if_there_are_enough(
    gpus: str, nproc: int, expected: list[str]
) -> None:
    given = [node_environment(index, nproc, {VISIBLE: gpus})[VISIBLE] for index in range(4)]
    assert given == expected


def test_nothing_is_set_without_a_gpu() -> None:
    assert node_environment(0, 1, {VISIBLE: ""}) == {}

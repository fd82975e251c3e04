"""Device faults: their recognition, and the end of a worker after one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from elastic.domain.errors import SlotError, VaultError, VaultFull
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.device_fault import (
    is_device_fault,
    is_local_fault,
    is_node_fault,
)
from elastic.worker.transport.links import Links

ECC = "CUDA error: uncorrectable ECC error encountered"
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 21474836480 bytes. Error code 12 (Cannot allocate memory)"
)
accelerator: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(ECC), True),
        (accelerator(ECC), True),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled system error"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), False),
        (torch.OutOfMemoryError("CUDA error: whatever"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError(ECC), False),
    ],
)
def test_device_faults_are_recognized(error: Exception, expected: bool) -> None:
    assert is_device_fault(error) is expected
    assert is_local_fault(error) is (expected and "NCCL" not in str(error))


def _caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(5, "Input/output error"), True),
        (OSError(28, "No space left on device"), True),
        (OSError(24, "Too many open files"), True),
        (_caused_by(ValueError("the sample is unusable"), OSError(5, "I/O error")), True),
        (VaultFull("no room for a copy"), True),
        (SlotError("cannot create a slot"), True),
        (RuntimeError(ECC), True),
        (MemoryError(), True),
        (_caused_by(ValueError("the sample is unusable"), MemoryError()), True),
        (RuntimeError(NO_MEMORY), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (BlockingIOError(11, "Resource temporarily unavailable"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), False),
        (FileNotFoundError(2, "No such file"), False),
        (VaultError("a copy is gone"), False),
        (ValueError("mine"), False),
    ],
)
def test_faults_of_a_node_are_recognized(error: Exception, expected: bool) -> None:
    assert is_node_fault(error) is expected


def test_memory_that_the_allocator_refuses_is_a_fault_of_the_node() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_local_fault(refused.value), refused.value


@pytest.mark.parametrize("text", [ECC, NO_MEMORY, "can't start new thread"])
def test_a_fault_of_the_node_during_a_wait_is_no_link_failure(text: str) -> None:
    """The peer must not be suspected. After abandoning the epoch, errors do not matter."""
    links = Links(1, 0, 1, torch.device("cpu"), AbandonSignal(), 1.0)
    with pytest.raises(RuntimeError, match=re.escape(text)), links.translate_errors(1):
        raise RuntimeError(text)
    links.abandon.set("epoch 2")
    with pytest.raises(EpochAbandoned), links.translate_errors(1):
        raise RuntimeError(text)


SCRIPT = """
import sys
from elastic.worker.transport.device_fault import crash_on_node_fault
try:
    with crash_on_node_fault(print, 3):
        raise {error}
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    "error",
    [
        f'RuntimeError("{ECC}\\nCompile with ...")',
        'OSError(5, "Input/output error")',
        "MemoryError()",
        'RuntimeError("mine")',
    ],
)
def test_the_process_reports_the_fault_and_exits_without_cleanup(error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" in done.stderr
    if "ECC" in error:
        assert done.stdout == f"Crashed(message='RuntimeError: {ECC}', local_rank=3)\n"
    elif "MemoryError" in error:
        assert done.stdout == "Crashed(message='MemoryError', local_rank=3)\n"
    elif "OSError" in error:
        text = "Crashed(message='OSError: [Errno 5] Input/output error', local_rank=3)"
        assert done.stdout == f"{text}\n"
    else:
        assert done.stdout == "cleaned up\n"

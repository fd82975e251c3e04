"""Classifies errors: a fault of a device or of the node itself, or an error of the script."""

from __future__ import annotations

import errno

from elastic.domain.errors import SlotError, VaultFull

DEVICE_TEXTS = (
    "CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "cuDNN error",
    "HIP error", "NCCL error", "unhandled cuda error", "uncorrectable ECC", "ECC error",
    "unspecified launch failure", "NVML", "Xid",
)  # fmt: skip
"""Texts of device errors."""
SCRIPT_TEXTS = (
    "out of memory", "ALLOC_FAILED", "device-side assert", "no kernel image", "invalid argument",
    "invalid configuration argument", "invalid device function", "invalid device ordinal",
    "STATUS_INVALID_VALUE", "STATUS_NOT_SUPPORTED", "STATUS_BAD_PARAM",
)  # fmt: skip
"""Texts of device errors that the script caused, with a request that no device can serve."""
LINK_TEXTS = ("NCCL",)
"""Texts of device errors that the device at the other end of a link may have caused."""

HOST_TEXTS = (
    "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc", "can't start new thread",
)  # fmt: skip
"""Texts of errors of a node that has no memory or no threads left. Another node may have them."""
HOST_ERRORS = frozenset(
    {
        errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.EREMOTEIO,
        errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    }
)  # fmt: skip
"""Errors of a disk, a mount or a system at its limits. Another node may not have them."""

SHORTAGES = (SlotError.__name__, VaultFull.__name__)
"""Errors of a vault that can take no copies."""
SHORTAGE_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "Too many open files",
    "Cannot allocate memory",
)
"""Texts of a system at its limits."""


def is_host_fault(error: BaseException | None) -> bool:
    """Return whether the storage, the memory or a limit of this node caused `error`, or an error
    behind it (`__cause__`)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in HOST_ERRORS:
            return True
        by_text = isinstance(error, RuntimeError) and any(part in str(error) for part in HOST_TEXTS)
        if by_text or isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False


def is_device_error(text: str) -> bool:
    """Return whether the device is at fault, so that a restart of the worker may help."""
    return any(part in text for part in DEVICE_TEXTS) and not is_script_error(text)


def is_script_error(text: str) -> bool:
    """Return whether the script made a request that no device can serve."""
    return any(part in text for part in SCRIPT_TEXTS)


def is_link_error(text: str) -> bool:
    """Return whether the device at the other end of a link may be at fault."""
    return any(part in text for part in LINK_TEXTS)


def is_shortage(text: str) -> bool:
    """Return whether a node had no room or no descriptors. `text`: type and message of an error."""
    return text.startswith(SHORTAGES) or any(part in text for part in SHORTAGE_TEXTS)

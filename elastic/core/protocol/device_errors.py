"""Classifies the texts of errors from devices and drivers: the device's fault or the script's."""

from __future__ import annotations

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


def is_device_error(text: str) -> bool:
    """Return whether the device is at fault, so that a restart of the worker may help."""
    return any(part in text for part in DEVICE_TEXTS) and not is_script_error(text)


def is_script_error(text: str) -> bool:
    """Return whether the script made a request that no device can serve."""
    return any(part in text for part in SCRIPT_TEXTS)


def is_link_error(text: str) -> bool:
    """Return whether the device at the other end of a link may be at fault."""
    return any(part in text for part in LINK_TEXTS)

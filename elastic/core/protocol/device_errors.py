"""Words of the errors that devices and their drivers raise: whether an error is the device's or the script's."""

from __future__ import annotations

DEVICE_WORDS = (
    "CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "cuDNN error", "HIP error", "NCCL error",
    "unhandled cuda error", "uncorrectable ECC", "ECC error", "unspecified launch failure", "NVML", "Xid",
)  # fmt: skip
"""In the text of an error: it is the device's."""
SCRIPT_WORDS = (
    "out of memory", "ALLOC_FAILED", "device-side assert", "no kernel image", "invalid argument",
    "invalid configuration argument", "invalid device function", "invalid device ordinal",
    "STATUS_INVALID_VALUE", "STATUS_NOT_SUPPORTED", "STATUS_BAD_PARAM",
)  # fmt: skip
"""In the text of a device's error: the script asked for what no device can do, another one as little as this one."""
LINK_WORDS = ("NCCL",)
"""In the text of a device's error: the other end may have caused it."""


def is_device_error(text: str) -> bool:
    """Whether an error of this text is for starting the worker again, perhaps elsewhere, and not the script's own."""
    return any(word in text for word in DEVICE_WORDS) and not is_script_error(text)


def is_script_error(text: str) -> bool:
    """Whether the script asked a device for what it cannot do."""
    return any(word in text for word in SCRIPT_WORDS)


def is_link_error(text: str) -> bool:
    """Whether the other end of a link may have caused it."""
    return any(word in text for word in LINK_WORDS)

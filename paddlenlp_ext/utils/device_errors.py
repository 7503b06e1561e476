"""Explain Paddle's errors about a device: memory that is used up, and operators without a kernel."""

from __future__ import annotations

import re

_LESS_MEMORY = (
    "use less memory: lower per_device_train_batch_size or max_length, or set recompute: true (docs/memory.md)"
)
_REMEDIES = (
    (
        r"Out of memory error on (?P<device>\w+ \d+)\. Cannot allocate (?P<size>\S+)",
        "out of memory on {device}: no {size}",
    ),
    (
        r"CustomDevice error, the error code is : 2\b",
        "the plug-in of the device reports that memory is used up, or that a query failed",
    ),
)
_MISSING = re.compile(
    r"The kernel with key \((?P<device>[^,]+), [^)]*\), (?P<dtype>\w+)\) of kernel `(?P<kernel>\w+)` is not"
)


def explain(error: BaseException) -> str | None:
    """Return cause and remedy of an error that Paddle raised for a device; None for other errors."""
    text = str(error)
    for pattern, cause in _REMEDIES:
        if (found := re.search(pattern, text)) is not None:
            return f"{cause.format(**found.groupdict())}; {_LESS_MEMORY}"
    if (found := _MISSING.search(text)) is None:
        return None
    return (
        f"Paddle has no kernel {found['kernel']} in {found['dtype']} for the device {found['device']}; set the "
        "environment variable FLAGS_use_stride_kernel=0, or run pnx doctor --device with the device's name "
        "(docs/reference/devices.md)"
    )

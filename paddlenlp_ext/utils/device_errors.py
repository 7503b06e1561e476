"""Explain Paddle's errors about a device: out of memory, and plug-ins that lack a library or a kernel.

A missing kernel for the CPU or a GPU is a defect of this project, so the error keeps its traceback.
"""

from __future__ import annotations

import re

_LESS_MEMORY = "use less memory, such as a smaller batch or max_length, or in training recompute: true (docs/memory.md)"
_ERRORS = (
    (
        r"Out of memory error on (?P<device>\w+ \d+)\. Cannot allocate (?P<size>\S+)",
        f"out of memory on {{device}}: no {{size}}; {_LESS_MEMORY}",
    ),
    (
        r"CustomDevice error, the error code is : 2\b",
        "the plug-in reports that the device is out of memory, or that it cannot use the device; check the device "
        f"with the vendor's tool, or {_LESS_MEMORY}",
    ),
    (
        r"Fail to open library: (?P<path>.+) with error: (?P<reason>.+)",
        "Paddle cannot load the plug-in {path}: {reason}; install the missing driver or library, or set "
        "CUSTOM_DEVICE_ROOT= to run without plug-ins (docs/devices.md)",
    ),
)
# Paddle writes its own backends in upper case, such as CPU and GPUDNN.
_MISSING_IN_PLUG_IN = re.compile(
    r"The kernel with key \((?P<device>[a-z]\w*), [^)]*\), (?P<dtype>\w+)\) of kernel `(?P<kernel>\w+)` is not"
)


def explain(error: BaseException) -> str | None:
    """Return cause and remedy of an error that Paddle raised for a device; None for other errors."""
    text = str(error)
    for pattern, message in _ERRORS:
        if (found := re.search(pattern, text)) is not None:
            return message.format(**found.groupdict())
    if (found := _MISSING_IN_PLUG_IN.search(text)) is None:
        return None
    return (
        f"Paddle has no kernel {found['kernel']} in {found['dtype']} for the device {found['device']}; set the "
        "environment variable FLAGS_use_stride_kernel=0, or run pnx doctor --device with the device's name "
        "(docs/devices.md)"
    )

"""Detect a usable GPU without importing Paddle."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    """Return whether the installed Paddle was built for GPUs and the machine has a visible one."""
    return not _gpus_hidden() and _paddle_built_for_gpu() and any(Path(node).exists() for node in _GPU_NODES)


def _gpus_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs: CUDA ignores the list from its first invalid entry on."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")


def _paddle_built_for_gpu() -> bool:
    # The file is read as text because importing Paddle takes seconds.
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).parent / "version" / "__init__.py"
    match = re.search(r"^cuda_version\s*=\s*'([^']*)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return match is not None and match.group(1) != "False"

"""Which device there is to compute on, found without loading Paddle."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    """Whether the installed Paddle was built for GPUs and this machine shows one."""
    return _paddle_built_for_gpu() and any(Path(node).exists() for node in _GPU_NODES)


def _paddle_built_for_gpu() -> bool:
    # Read, not imported: importing Paddle takes seconds, and this room does not know it.
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).parent / "version" / "__init__.py"
    match = re.search(r"^cuda_version\s*=\s*'([^']*)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return match is not None and match.group(1) != "False"

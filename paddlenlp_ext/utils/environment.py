"""Describe the operating system, the installed packages and the processor of this machine."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("paddlenlp-ext", "paddlepaddle", "paddlepaddle-gpu", "triton", "numpy", "safetensors", "transformers")
_CPUINFO = Path("/proc/cpuinfo")


def describe_system() -> list[tuple[str, str]]:
    """Return ("system", operating system and Python), and (name, version) of each installed package in `PACKAGES`."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    versions = ((name, _version(name)) for name in PACKAGES)
    return [("system", system), *((name, version) for name, version in versions if version is not None)]


def processor_name() -> str:
    """Return the model name of the processor, or "unknown"."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""Choose the device of programs whose result does not depend on it."""

from __future__ import annotations

from paddlenlp_ext._runtime import choose_device
from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.utils.logging import get_logger


def choose_device_or_cpu(name: str) -> None:
    """Run on the device `name` of `--device`; replace a GPU by the CPU, with a warning, on a machine without one.

    Raises:
        ValueError: see `choose_device`.
    """
    if name.partition(":")[0] == "gpu" and not has_gpu():
        get_logger().warning("--device %s: no GPU is available, running on the CPU", name)
        name = "cpu"
    choose_device(name)

"""List the operators without a kernel for a device. Paddle computes them on the CPU, and copies their tensors.

A plug-in of a vendor has kernels for a part of Paddle's operators.
"""

from __future__ import annotations

from paddlenlp_ext.devices import device_type
from paddlenlp_ext.doctor.check import Check, Difference
from paddlenlp_ext.doctor.report import table
from paddlenlp_ext.paddle_compat import kernel_devices, recorded_operators

_SHOWN = 3


class OperatorCalls:
    """Operators of Paddle, with the checks that call them, or whose reference calls them."""

    def __init__(self) -> None:
        self.callers: dict[str, list[str]] = {}

    def recorded(self, check: Check) -> Check:
        """Return the check with a measurement that also records its operators."""

        def measure() -> Difference | None:
            names: set[str] = set()
            try:
                with recorded_operators(names):
                    return check.measure()
            finally:
                for name in names:
                    self.callers.setdefault(name, []).append(f"{check.area}, {check.name}")

        return check._replace(measure=measure)

    def missing(self, device: str) -> dict[str, list[str]]:
        """Return operators or gradients without a kernel for the device, such as "add, add_grad" -> callers."""
        kind, devices = device_type(device), kernel_devices()
        missing = {}
        for name, callers in sorted(self.callers.items()):
            kernels = [kernel for kernel in (name, f"{name}_grad") if kernel in devices]
            if absent := [kernel for kernel in kernels if not {kind, kind.upper()} & devices[kernel]]:
                missing[", ".join(absent)] = callers
        return missing

    def describe_missing(self, device: str) -> str:
        """Return a Markdown table of the missing kernels."""
        if not self.callers:
            return "No operator was recorded."
        missing = self.missing(device)
        if not missing:
            return "Every called operator has a kernel."
        rows = [(operator, _described(callers)) for operator, callers in missing.items()]
        head = f"Paddle computes {len(missing)} operators on the CPU. The second column names checks that call them."
        return f"{head}\n\n{table(['operator', 'called by'], rows)}"


def _described(callers: list[str]) -> str:
    others = len(callers) - _SHOWN
    return "; ".join(callers[:_SHOWN]) + (f"; {others} others" if others > 0 else "")

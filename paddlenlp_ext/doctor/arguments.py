"""Parse the command line of the doctor, without the slow import of Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import OptionGroup, option, options_of
from paddlenlp_ext.devices import resolve_auto, unavailable_reason

AREAS = ("ops", "training", "generation", "layouts")
USAGE = (
    "python -m paddlenlp_ext.doctor [--device NAME] [--areas AREA,...] [--seconds 90]\n\n"
    "Check this installation and print a report in Markdown. The exit code is 1 if a check failed."
)


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(OptionGroup):
    """Command-line arguments of the doctor."""

    areas: tuple[str, ...] = option((), help=f"areas to check: {', '.join(AREAS)}; unset: all areas")
    device: str | None = option(
        None,
        help="device to check, such as npu:0 (docs/devices.md); unset: the CPU and, if there is one, a GPU",
    )
    seconds: float = option(90.0, minimum=0, help="time in seconds after which no further check starts; 0: no limit")


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> DoctorArguments:
    """Parse the command line; `usage` is the beginning of the help text.

    Raises:
        ConfigError: arguments are unknown or invalid; the message lists all problems.
        ValueError: an area is unknown, or the device is not available.
    """
    values, _ = parse_command_line(argv, options_of(DoctorArguments, "arguments"), usage)
    arguments = DoctorArguments(**values)
    arguments = replace(arguments, areas=tuple(area.strip() for area in arguments.areas))
    if arguments.device is not None:
        if (reason := unavailable_reason(arguments.device)) is not None:
            raise ValueError(reason)
        arguments = replace(arguments, device=resolve_auto(arguments.device))
    for area in arguments.areas:
        if area not in AREAS:
            raise ValueError(f"--areas {area}: no such area; known: {', '.join(AREAS)}")
    return arguments

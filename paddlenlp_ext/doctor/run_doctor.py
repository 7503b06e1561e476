"""Run the checks of the doctor, show progress, and print the report."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date

from paddlenlp_ext.devices import device_type
from paddlenlp_ext.doctor.arguments import AREAS, DoctorArguments
from paddlenlp_ext.doctor.backends import choices
from paddlenlp_ext.doctor.check import Check, Result, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import CPU_TARGETS, GPU_TARGETS, Target, targets_of, unavailable_reason
from paddlenlp_ext.doctor.environment import describe_environment
from paddlenlp_ext.doctor.generation_checks import generation_checks
from paddlenlp_ext.doctor.missing_kernels import OperatorCalls
from paddlenlp_ext.doctor.op_checks import op_checks
from paddlenlp_ext.doctor.op_checks.case import OP_CASES
from paddlenlp_ext.doctor.parallel_layout_checks import layout_checks, layout_target
from paddlenlp_ext.doctor.report import backend_section, result_section, table, verdict
from paddlenlp_ext.doctor.training_checks import training_checks
from paddlenlp_ext.ops.dispatch import dispatched_ops

CHECKS = {"ops": op_checks, "generation": generation_checks, "training": training_checks}


def run_doctor(arguments: DoctorArguments) -> int:
    """Run the checks and return the exit code: 1 if a check failed, otherwise 0.

    The report goes to standard output, progress to standard error.
    """
    areas, every_target = arguments.areas or AREAS, targets_of(arguments.device)
    absent = [target for target in every_target if unavailable_reason(target) is not None]
    OP_CASES.names()  # imports the modules that register ops and their test cases
    print(f"# paddlenlp_ext doctor, {date.today()}\n")
    print(table(["setting", "value"], describe_environment()), end="\n\n")
    print("## Backends\n")
    print(backend_section(choices(dispatched_ops(), every_target), absent), end="\n\n")
    sys.stdout.flush()
    in_order = (*GPU_TARGETS, *CPU_TARGETS) if arguments.device is None else every_target
    calls = OperatorCalls()
    checks = ordered_checks([target for target in in_order if target not in absent], areas)
    if arguments.device is not None:
        checks = [calls.recorded(check) for check in checks]
    results, skipped = run_with_progress(checks, arguments.seconds)
    print("## Checks\n")
    print(verdict(results, len(skipped)), end="\n\n")
    print(result_section(results))
    if arguments.device is not None:
        print(f"\n## Operators without a kernel for {arguments.device}\n")
        print(calls.describe_missing(arguments.device))
    if rows := [*not_run(absent, areas, arguments.device), *no_time(skipped, arguments.seconds)]:
        print("\n### Not run\n")
        print(table(["target", "checks", "reason"], rows))
    return int(not all(result.passed for result in results))


def ordered_checks(targets: Sequence[Target], areas: Sequence[str]) -> list[Check]:
    """Return the checks of the areas, ordered by target, with late checks last.

    The checks of parallel layouts follow the checks of the first target.
    """
    groups = [[check for area in CHECKS if area in areas for check in CHECKS[area](target)] for target in targets]
    if "layouts" in areas:
        groups.insert(1, layout_checks(layout_target(targets[0].device)))
    return sorted(itertools.chain(*groups), key=lambda check: check.is_late)


def no_time(skipped: Sequence[Check], seconds: float) -> list[tuple[str, str, str]]:
    """Return table rows (target, checks, reason) of the checks that the time limit skipped."""
    reason = f"the time limit of {seconds:g} seconds was reached; --seconds 0 runs all checks"
    groups = Counter((str(check.target), check.area) for check in skipped)
    return [(target, f"{count} {area}", reason) for (target, area), count in groups.items()]


def not_run(absent: Iterable[Target], areas: Sequence[str], device: str | None) -> list[tuple[str, str, str]]:
    """Return table rows (target, checks, reason) of the checks that this machine cannot run.

    Args:
        absent: unavailable targets.
        areas: areas to check.
        device: the device to check; None: the CPU and a GPU.
    """
    rows = []
    for target in absent:
        counts = [f"{len(make(target))} {area}" for area, make in CHECKS.items() if area in areas]
        rows.append((str(target), ", ".join(counts), str(unavailable_reason(target))))
    kind, layouts = device_type(device or "gpu"), layout_target(device)
    if "layouts" in areas and layouts.device != kind:
        checks = f"{len(layout_checks(layouts))} layouts"
        rows.append((f"{kind} {layouts.dtype}", checks, "needs two devices; ran on the CPU"))
    return rows


def run_with_progress(checks: Sequence[Check], seconds: float = 0.0) -> tuple[list[Result], list[Check]]:
    """Run checks and report progress: the current check on a terminal, or one line per area and target in a log file.

    Args:
        checks: the checks in descending order of importance.
        seconds: time in seconds after which no further check starts; 0: no limit.

    Returns:
        The results, and the checks that the time limit skipped.
    """
    results: list[Result] = []
    started, is_terminal, group = time.monotonic(), sys.stderr.isatty(), None
    for number, check in enumerate(checks, start=1):
        if 0 < seconds < time.monotonic() - started:
            break
        if is_terminal:
            line = f"[{number}/{len(checks)}] {check.area}, {check.target}: {check.name}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif group != (group := (check.area, check.target)):
            print(f"{time.monotonic() - started:5.0f} s  {check.area}, {check.target}", file=sys.stderr, flush=True)
        results += run_checks([check])
    else:
        number = len(checks) + 1
    if is_terminal:
        print("\r\033[K", end="", file=sys.stderr)
    return results, list(checks[number - 1 :])

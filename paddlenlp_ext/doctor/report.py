"""Format the results of the doctor as Markdown, which users can paste into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.doctor.backends import Choice
from paddlenlp_ext.doctor.check import Result
from paddlenlp_ext.doctor.devices_and_dtypes import Target


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with vertical bars in cells escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def backend_section(choices: Sequence[Choice], absent: Sequence[Target]) -> str:
    """Return a table of backends with one column per target, and a list of the backends that the user can enable."""
    targets = list(dict.fromkeys(choice.target for choice in choices))
    ops: dict[str, list[str]] = {}
    for choice in choices:
        ops.setdefault(choice.op, []).append(choice.backend)
    heads = [f"{target} *" if target in absent else str(target) for target in targets]
    reasons = {
        f"{choice.op}, {choice.target}: not {name}: {reason}": None
        for choice in choices
        for name, reason in choice.fixable.items()
    }
    capability = ".".join(map(str, AbsentGpu().compute_capability))
    notes = [
        'The column "cpu bfloat16" applies to weights and gradients, because on a CPU activations are float32 even in '
        "bfloat16 runs."
    ]
    if absent:
        notes.append(f"\\* Not available on this machine; a gpu column assumes compute capability {capability}.")
    blocks = [table(["op", *heads], ([op, *names] for op, names in ops.items())), *notes, _list(reasons)]
    return "\n\n".join(block for block in blocks if block)


def result_section(results: Sequence[Result]) -> str:
    """Return a summary by area and target, the failed checks, and a collapsed section with all results."""
    failed = [result for result in results if not result.passed]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.check.area, str(result.check.target)), []).append(result)
    summary = [
        [*group, f"{sum(r.passed for r in members)} of {len(members)}", f"{sum(r.seconds for r in members):.1f} s"]
        for group, members in groups.items()
    ]
    parts = [
        table(["area", "target", "passed", "time"], summary),
        *(["### Failed", _failure_table(failed)] if failed else []),
        f"<details><summary>All {len(results)} checks</summary>\n\n{_result_table(results)}\n\n</details>",
    ]
    return "\n\n".join(parts)


def verdict(results: Sequence[Result], num_skipped: int = 0) -> str:
    """Return a line with the number of failed or passed checks and the number of checks skipped by the time limit."""
    failed = sum(not result.passed for result in results)
    outcome = f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks passed"
    return f"**{outcome}**" + (f"; {num_skipped} skipped by the time limit" if num_skipped else "")


def _failure_table(results: Iterable[Result]) -> str:
    rows = (
        [*_names(result), *_outcome(result), "" if result.difference is None else result.difference.place]
        for result in results
    )
    return table([*_COLUMNS, "largest difference"], rows)


def _result_table(results: Iterable[Result]) -> str:
    return table(_COLUMNS, ([*_names(result), *_outcome(result)] for result in results))


_COLUMNS = ("area", "check", "target", "result", "difference", "limit")


def _names(result: Result) -> tuple[str, str, str]:
    return result.check.area, result.check.name, str(result.check.target)


def _outcome(result: Result) -> tuple[str, str, str]:
    limit = f"{result.check.limit:.0e}"
    if result.error is not None:
        return "error", result.error, limit
    assert result.difference is not None, "a result without an error must have a difference"
    return "pass" if result.passed else "differs", f"{result.difference.relative:.1e}", limit


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

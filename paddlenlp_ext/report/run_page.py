"""Render the report of a run as one HTML page, without scripts or external files."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from markupsafe import Markup

from paddlenlp_ext.report.findings import describe_time, duration, find_all, verdict
from paddlenlp_ext.report.line_chart import Chart, Line, Mark, format_value, smoothed_line
from paddlenlp_ext.report.run_folder import Run, is_eval_loss
from paddlenlp_ext.report.templates import fill_page
from paddlenlp_ext.utils.secrets import without_secrets

_MAX_EVALUATIONS = 40
_MAX_BAD_STEPS = 20
_MAX_ROWS = 8
_HIDDEN_METRICS = ("_second", "_runtime", "_num_rows", "_num_target_tokens")


def render_run(run: Run) -> str:
    """Return the HTML page of a run."""
    metrics, evaluations = _evaluation_table(run)
    return fill_page(
        "run_page.html",
        f"Run {run.name}",
        run=run,
        verdict=verdict(run),
        findings=find_all(run),
        cards=_cards(run),
        loss=loss_chart(run),
        charts=[chart for chart in _step_charts(run) if chart],
        is_per_step=bool(run.start),
        metrics=metrics,
        evaluations=evaluations,
        data=_data_table(run),
        lengths=_length_bars(run.start.get("data") or {}),
        audit=_audit_counts(run),
        keys=_changed_keys(run),
        environment=list(run.start.get("environment", {}).items()),
        commands=commands(run),
        sampled=[_sampled_table(event) for event in run.sampled_answers],
        bad_steps=run.bad_steps[:_MAX_BAD_STEPS],
        num_more_bad=max(0, len(run.bad_steps) - _MAX_BAD_STEPS),
        max_rows=_MAX_ROWS,
        written=describe_time(time.time()),
    )


def marks_of(run: Run) -> list[Mark]:
    """Return the vertical marks of a run: the best evaluation, resumed steps and skipped steps."""
    best = run.best()
    marks = [] if best is None else [Mark(best[1], "best dev loss", "best")]
    marks += [Mark(event["step"], "resumed", "resume") for event in run.events if event["event"] == "resume"]
    return marks + [Mark(entry["step"], "skipped", "bad") for entry in run.skipped[:200]]


def loss_chart(run: Run) -> Markup:
    """Return the chart of the training loss, raw and smoothed, and of the evaluation losses."""
    raw = run.series("loss")
    smooth = smoothed_line(raw, "training")
    is_smoothed = smooth.name != "training"
    lines = [Line("training, each step" if run.start else "training, log entries", raw, "raw")] if is_smoothed else []
    lines += [smooth if is_smoothed else Line("training", raw, "main")]
    for number, name in enumerate(run.loss_names, start=1):
        dev_set = name.removeprefix("eval_").removesuffix("loss").strip("_")
        lines.append(Line(f"dev {dev_set}".strip(), run.eval_series(name), f"dots run{number % 6 + 1}"))
    return Chart("Loss", lines, marks_of(run), "nats per target token" if _is_per_token(run) else "").render()


def _is_per_token(run: Run) -> bool:
    return run.start.get("kind", "sft") == "sft" and not any("rewards/chosen" in entry for entry in run.steps[:1])


def step_values() -> list[tuple[str, str, str, bool]]:
    """Return title, unit, name in `Run.series`, and whether the y axis begins at 0, for each chart below the losses.

    A chart without values is not shown; the first six are of GRPO.
    """
    return [
        ("Reward", "mean of a sampled batch", "reward", False),
        ("Completion length", "tokens", "completions/mean_length", True),
        ("Truncated completions", "fraction", "completions/clipped_ratio", True),
        ("Entropy", "nats per token", "entropy", True),
        ("KL divergence", "from the reference model", "kl", True),
        ("Clipped tokens", "fraction", "clip_ratio/region_mean", True),
        ("Learning rate", "", "learning_rate", True),
        ("Gradient norm", "before clipping", "grad_norm", False),
        ("Speed", "tokens/s", "tokens_per_second", True),
        ("Peak memory", "GiB", "peak_memory_gib", True),
        ("Peak device memory", "GiB", "peak_device_memory_gib", True),
    ]


def _step_charts(run: Run) -> list[Markup]:
    limit = run.config.get("max_grad_norm")
    limits = {"grad_norm": (float(limit), f"max_grad_norm {limit:g}")} if limit else {}
    return [
        Chart(title, [Line(title.lower(), run.series(key))], unit=unit, limit=limits.get(key), from_zero=zero).render()
        for title, unit, key, zero in step_values()
    ]


def _cards(run: Run) -> list[tuple[str, str, str]]:
    """Return name, value and detail of the numbers at the top of the page."""
    cards, best, losses = [], run.best(), run.series("loss")
    if best is not None:
        cards.append(("best dev loss", format_value(best[2]), f"step {best[1]:,}"))
    if losses:
        cards.append(("last training loss", format_value(losses[-1][1]), f"step {losses[-1][0]:,}"))
        cards.append(("time in steps", duration(run.train_seconds), f"{run.last_step:,} of {run.total_steps:,} steps"))
    if run.num_tokens:
        speed = run.num_tokens / max(run.train_seconds, 1e-9)
        cards.append(("tokens", f"{run.num_tokens:,}", f"{speed:,.0f} tokens/s"))
    peak = max((gib for _, gib in run.series("peak_memory_gib")), default=0)
    if peak:
        cards.append(("peak memory", f"{peak:.2f} GiB", "of the main process"))
    return cards


def _evaluation_table(run: Run) -> tuple[list[str], list[tuple[str, list[str], bool]]]:
    """Return the names of the metrics, and for each evaluation its step, its values and whether it is the best."""
    entries = run.evaluations
    if len(entries) > _MAX_EVALUATIONS:
        every = -(-len(entries) // _MAX_EVALUATIONS)
        entries = entries[:-1:every] + entries[-1:]
    shown = [(f"{entry['step']:,}", entry) for entry in entries]
    final = {name: value for name, value in run.results.items() if name.startswith(("eval_", "test_"))}
    if final:
        shown.append(("end", {name.replace("test_", "test: ", 1): value for name, value in final.items()}))
    names = {name: None for _, entry in shown for name, value in entry.items() if _is_metric(name, value)}
    best = run.best()
    return list(names), [
        (
            step,
            [format_value(entry[name]) if name in entry else "" for name in names],
            best is not None and entry.get("step") == best[1],
        )
        for step, entry in shown
    ]


def _sampled_table(event: dict[str, Any]) -> tuple[int, list[str], list[tuple[str, str, list[str]]]]:
    """Return the step of sampled answers, the names of their rewards, and prompt, answer and rewards of each."""
    answers = event["answers"]
    names = list({name: None for answer in answers for name in answer["scores"]})
    rows = [
        (
            answer["prompt"],
            answer["answer"],
            [_reward(value) for value in (answer["reward"], *map(answer["scores"].get, names))],
        )
        for answer in answers
    ]
    return event["step"], ["reward", *names], rows


def _reward(value: float | None) -> str:
    return "none" if value is None else format_value(value)


def _is_metric(name: str, value: Any) -> bool:
    is_named = name.startswith(("eval_", "test: ")) and not name.endswith(_HIDDEN_METRICS)
    return is_named and (is_eval_loss(name) or isinstance(value, int | float))


def _data_table(run: Run) -> list[tuple[str, str]]:
    data = run.start.get("data") or {}
    if not data:
        return []
    share = data["num_target_tokens"] / max(1, data["num_tokens"])
    names = (("rows read", "num_read"), ("rows truncated", "num_truncated"), ("rows dropped", "num_dropped"))
    return [
        *((words, f"{data[name]:,}") for words, name in names),
        ("examples", f"{data['num_rows']:,}"),
        ("tokens", f"{data['num_tokens']:,}"),
        ("target tokens", f"{data['num_target_tokens']:,} ({share:.1%})"),
        ("tokens of an example", f"median {data['median_length']:,}, longest {data['longest']:,}"),
    ]


def _length_bars(data: dict[str, Any]) -> list[tuple[float, str]]:
    """Return the height in percent and the description of each bar of the length histogram."""
    bins, width = data.get("bins", []), data.get("bin_width", 1)
    top = max(bins, default=1)
    return [
        (100 * count / top, f"{count:,} examples of {index * width + 1:,} to {(index + 1) * width:,} tokens")
        for index, count in enumerate(bins)
    ]


def _audit_counts(run: Run) -> list[tuple[str, int]]:
    audit = run.audit
    return [] if audit is None else [(name, audit.get(name, 0)) for name in ("errors", "warnings", "notes")]


def _changed_keys(run: Run) -> list[tuple[str, str, str]]:
    """Return key, value and default of each changed key; for runs of earlier versions, of all keys with a value."""
    changed = run.start.get("changed_keys")
    if changed is None:
        return [(key, as_text(value), "") for key, value in without_secrets(run.config).items() if value is not None]
    return [(key, as_text(value), as_text(default)) for key, (value, default) in changed.items()]


def as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs: the run's command, a command that repeats the run, and the next commands."""
    kind, folder = run.start.get("kind", "sft"), shlex.quote(str(run.folder))
    listed = [("The command of this run", shlex.join(run.start["command"]))] if run.start.get("command") else []
    repeat = ["pnx", kind, f"{run.folder}/run_config.json", "--output_dir", f"{run.folder}-2"]
    if run.config.get("resume_from_checkpoint"):
        repeat += ["--resume_from_checkpoint", "false"]
    listed.append(("Repeat the run in a new folder", shlex.join(repeat)))
    if run.end is not None and run.end["outcome"] != "completed":
        if run.last_step:
            listed.append(("Continue the run", f"pnx {kind} {folder}/run_config.json --resume_from_checkpoint true"))
    elif kind != "reward":
        listed.append(("Chat with the model", f"pnx chat {folder}"))
    return [*listed, ("Refresh this page", f"pnx report {folder}")]

"""Describe in words how a run ended, and list findings about its losses, steps and data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from paddlenlp_ext.report.line_chart import format_value, smoothed
from paddlenlp_ext.report.run_folder import Run

ERROR, WARNING, NOTE, GOOD = "error", "warning", "note", "good"
_RISE = 0.01
"""Relative increase from the lowest to the last evaluation loss, above which the loss is reported as rising."""
_FALLING = 0.03
_MOSTLY = 0.9
_MAX_LISTED = 5


@dataclass(frozen=True)
class Finding:
    """Finding about a run, with its severity: "error", "warning" or "note"."""

    severity: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """Result of a run: a severity ("good", "note", "warning", "error"), a headline, and sentences on loss and cost."""

    severity: str
    headline: str
    details: str


def verdict(run: Run) -> Verdict:
    """Return how a run ended, its best loss, and its cost in time and tokens."""
    severity, headline = outcome(run)
    if run.end is not None and run.end["outcome"] != "completed":
        headline += f": {run.end['reason']}"
    return Verdict(severity, headline, "".join(f"{detail}. " for detail in _details(run)).strip())


def outcome(run: Run) -> tuple[str, str]:
    """Return a severity and a few words about the end of a run, such as "Stopped at step 400 of 600"."""
    step, total, end = run.last_step, run.total_steps, run.end
    progress = f"step {step:,} of {total:,}"
    if end is not None and end["outcome"] != "completed":
        if not run.total_steps:
            return ERROR, "Failed before the first step"
        return (ERROR, f"Failed at {progress}") if end["outcome"] == "failed" else (WARNING, f"Stopped at {progress}")
    if end is not None:
        early = f"Ended early at {progress}, by early stopping or a callback"
        return (GOOD, early if step < total else f"Completed: {step:,} steps")
    if run.is_active:
        return NOTE, f"Running: {progress}"
    # A run of an earlier version has no events.
    if run.events:
        return ERROR, f"Killed at {progress}"
    return NOTE, f"{step:,} steps" if run.steps else "Evaluation without training"


def _details(run: Run) -> Iterator[str]:
    best = run.best()
    if best is not None:
        name, step, value = best
        yield f"Best {_spoken(name)} {format_value(value)} at step {step:,}"
    elif "eval_loss" in run.results:
        yield f"Dev loss {format_value(run.results['eval_loss'])} at the end"
    if losses := run.series("loss"):
        if best is None:
            yield f"Training loss {format_value(losses[-1][1])} at step {losses[-1][0]:,}"
        cost = f"{duration(run.train_seconds)} in optimizer steps"
        yield f"{cost}, {run.num_tokens:,} tokens" if run.num_tokens else cost


def duration(seconds: float) -> str:
    """Return a duration as text, such as "1 h 05 min", "3 min 20 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def describe_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def find_all(run: Run) -> list[Finding]:
    """Return all findings about a run, the most severe first."""
    checks = (_unstable_steps, _skipped_steps, _dev_loss, _train_loss, _schedule, _gradients, _data, _audit, _history)
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.severity))


def _unstable_steps(run: Run) -> Iterator[Finding]:
    spikes = [entry["step"] for entry in run.bad_steps if entry.get("reason") == "loss_spike"]
    broken = [entry["step"] for entry in run.bad_steps if entry.get("reason") == "non_finite"]
    if spikes:
        yield Finding(WARNING, f"{_count(len(spikes), 'loss spike')}: {_steps(spikes)}; the rows are listed below")
    if broken:
        text = f"loss or gradient norm is not finite in {_count(len(broken), 'step')}: {_steps(broken)}"
        yield Finding(ERROR, f"{text}; the rows are listed below")


def _skipped_steps(run: Run) -> Iterator[Finding]:
    reasons = {"overflow": "float16 gradients overflow", "non_finite": "loss not finite", "data": "data to skip"}
    for reason, words in reasons.items():
        skipped = [entry["step"] for entry in run.skipped if entry["skipped"] == reason]
        if skipped:
            share = len(skipped) / max(1, run.last_step)
            severity = WARNING if reason == "non_finite" or share > 0.05 else NOTE
            yield Finding(severity, f"{_count(len(skipped), 'step')} skipped ({words}): {_steps(skipped)}")


def _dev_loss(run: Run) -> Iterator[Finding]:
    has_none = not run.evaluations and not any(name.startswith("eval_") for name in run.results)
    if has_none and run.steps and run.config.get("evaluation_strategy", "no") == "no" and not run.is_active:
        text = "no evaluation, so the loss on unseen rows is unknown; set do_eval: true and evaluation_strategy"
        yield Finding(NOTE, text)
    for name in run.loss_names:
        points = run.eval_series(name)
        step, lowest = min(points, key=lambda point: point[1])
        last_step, last = points[-1]
        if last_step > step and last > lowest + _RISE * abs(lowest):
            values = f"{format_value(lowest)} at step {step:,}, {format_value(last)} at step {last_step:,}"
            text = f"{_spoken(name)} rises after step {step:,}: {values}; the model may overfit"
            keeps_best = run.config.get("load_best_model_at_end")
            remedy = (
                "the best weights were loaded at the end"
                if keeps_best
                else "load_best_model_at_end keeps the best weights"
            )
            yield Finding(WARNING, f"{text} ({remedy})")


def _train_loss(run: Run) -> Iterator[Finding]:
    losses = [loss for _, loss in run.series("loss")]
    if len(losses) < 8:
        return
    _, means = smoothed(losses)
    part = max(2, len(losses) // 10)
    begin, end = (sum(each) / part for each in (losses[:part], losses[-part:]))
    if end >= begin:
        text = (
            f"the training loss did not fall: {format_value(begin)} in the first steps, {format_value(end)} in the last"
        )
        yield Finding(WARNING, f"{text}; try another learning_rate")
        return
    quarter = len(means) // 4
    before = sum(losses[-2 * quarter : -quarter]) / quarter
    after = sum(losses[-quarter:]) / quarter
    rises = any(finding.severity == WARNING for finding in _dev_loss(run))
    if len(losses) >= 20 and before - after > _FALLING * abs(before) and not rises:
        text = f"the training loss was still falling at the end: {format_value(before)} in the third quarter"
        yield Finding(NOTE, f"{text}, {format_value(after)} in the last; more steps may help")


def _schedule(run: Run) -> Iterator[Finding]:
    rates = run.series("learning_rate")
    warmup, total = run.start.get("warmup_steps", 0), run.total_steps
    if rates and all(rate == 0 for _, rate in rates):
        yield Finding(ERROR, "the learning rate was 0 in every step, so the model did not change")
    elif rates and rates[0] == (1, 0.0):
        yield Finding(NOTE, "the learning rate was 0 in step 1, the first step of the warm-up")
    if warmup >= total > 0:
        text = f"the run has {total:,} steps and a warm-up of {warmup:,}, so learning_rate was not reached"
        yield Finding(WARNING, f"{text}; lower warmup_steps or warmup_ratio")


def _gradients(run: Run) -> Iterator[Finding]:
    limit, norms = run.config.get("max_grad_norm") or 0, [norm for _, norm in run.series("grad_norm")]
    clipped = sum(norm > limit for norm in norms)
    if limit and len(norms) >= 8 and clipped >= _MOSTLY * len(norms):
        text = f"gradients were clipped to max_grad_norm {limit:g} in {clipped:,} of {len(norms):,} steps"
        yield Finding(NOTE, text)


def _data(run: Run) -> Iterator[Finding]:
    data = run.start.get("data") or {}
    read = data.get("num_read", 0)
    for name, words in (("num_truncated", "were truncated to max_length"), ("num_dropped", "were dropped")):
        number = data.get(name, 0)
        if number:
            share = number / max(1, read)
            yield Finding(WARNING if share > 0.1 else NOTE, f"{number:,} of {read:,} rows ({share:.1%}) {words}")


def _audit(run: Run) -> Iterator[Finding]:
    for split in (run.audit or {}).get("splits", []):
        for found in split.get("findings", []):
            if found["severity"] == NOTE:
                continue
            count, place = found["count"], next((each["place"] for each in found["places"]), "")
            if found["check"] == "dev row in train":
                text = f"{_count(count, 'dev row')} {'is' if count == 1 else 'are'} also in train"
            else:
                text = f"{split['split']}: {found['check']} ({count:,})"
            yield Finding(found["severity"], f"{text}, first at {place} (data audit)")


def _history(run: Run) -> Iterator[Finding]:
    resumed = [event["step"] for event in run.events if event["event"] == "resume"]
    if resumed:
        yield Finding(NOTE, f"resumed {_count(len(resumed), 'time')}, after {_steps(resumed)}")
    back = [event for event in run.events if event["event"] == "rollback"]
    for event in back[:_MAX_LISTED]:
        yield Finding(WARNING, f"rolled back from step {event['from_step']:,} to step {event['step']:,}")


def _spoken(name: str) -> str:
    """Return the name of an evaluation loss in words: "dev loss", or "dev loss of math"."""
    dev_set = name.removeprefix("eval_").removesuffix("loss").strip("_")
    return f"dev loss of {dev_set}" if dev_set else "dev loss"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _steps(steps: list[int]) -> str:
    listed = ", ".join(f"{step:,}" for step in steps[:_MAX_LISTED])
    more = f" and {len(steps) - _MAX_LISTED} more" if len(steps) > _MAX_LISTED else ""
    return f"step{'s' * (len(steps) != 1)} {listed}{more}"

"""Render the results of an audit as a single HTML page, without scripts or external files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich.text import Text

from paddlenlp_ext.data.audit.findings import HIT, SEVERITIES, Finding
from paddlenlp_ext.data.audit.report import PERCENTILES, AuditReport, SplitReport
from paddlenlp_ext.data.preview import CONTEXT_STYLE, TARGET_STYLES, style_row
from paddlenlp_ext.utils.page_style import page_style

_COLORS = {"error": "--error", "warning": "--warning", "note": "--note"}
_MAX_TEXT = 4000
_MAX_LANGUAGES = 7
_WIDTH, _HEIGHT, _BASE = 460, 150, 128


def render_page(report: AuditReport, tokenizer: Any) -> str:
    """Return the HTML page of an audit.

    Args:
        report: results of the audit.
        tokenizer: tokenizer that decodes the example rows on the page.
    """
    title = f"Data audit: {escape(report.title)}"
    body = [
        f"<h1>{title}</h1>",
        f'<div class="dim">{report.num_rows:,} rows and {report.num_tokens:,} tokens in {report.seconds:.1f} s '
        f"({report.num_rows / report.seconds:,.0f} rows/s); {report.num_compared:,} rows compared with each other"
        "</div>",
        _counts(report),
    ]
    for split in report.splits:
        body += _split(split, report.max_length, tokenizer)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>\n{page_style()}</style></head>\n'
        f"<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _counts(report: AuditReport) -> str:
    cards = []
    for severity in SEVERITIES:
        number = report.count(severity)
        color = _COLORS[severity] if number else "--ok"
        name = severity + "s" * (number != 1)
        cards.append(f'<div class="count"><b style="color: var({color})">{number:,}</b>{name}</div>')
    return f'<div class="counts">{"".join(cards)}</div>'


def _split(split: SplitReport, max_length: int, tokenizer: Any) -> list[str]:
    sample = " (only the first rows of each file)" if split.is_sample else ""
    return [
        f'<h2>{escape(split.name)} <span class="dim">{escape(", ".join(split.files))}{sample}</span></h2>',
        '<div class="grid">',
        _card("Account", _account(split)),
        _card("Tokens of an example", _length_histogram(split, max_length)),
        _card("Share of target tokens in an example", _share_histogram(split)),
        _card("Languages", _languages(split)),
        "</div>",
        "<h2>Findings</h2>",
        *_findings(split),
        "<h2>First rows, as the model sees them</h2>",
        *_samples(split, tokenizer),
    ]


def _card(title: str, content: str) -> str:
    return f'<div class="card"><h3>{title}</h3>{content}</div>'


def _account(split: SplitReport) -> str:
    stats = split.rows.stats
    lines: list[tuple[str, str]] = [
        ("rows read", f"{stats.num_read:,}"),
        ("= kept in full", f"{stats.num_untruncated:,}"),
        ("+ truncated", f"{stats.num_truncated:,}"),
        *((f"+ dropped: {escape(reason)}", f"{count:,}") for reason, count in sorted(stats.dropped.items())),
        ("examples", f"{split.rows.num_examples:,}"),
        ("tokens", f"{stats.num_tokens:,}"),
        ("tokens truncated", f"{stats.num_truncated_tokens:,}"),
        ("target tokens", f"{stats.num_target_tokens:,} ({split.target_share:.1%})"),
        ("target tokens lost", f"{stats.num_lost_target_tokens:,} ({stats.lost_target_share:.1%})"),
    ]
    return _table(lines)


def _table(lines: Sequence[tuple[str, str]]) -> str:
    cells = (f'<tr><td>{name}</td><td class="right">{value}</td></tr>' for name, value in lines)
    return f"<table>{''.join(cells)}</table>"


def _length_histogram(split: SplitReport, max_length: int) -> str:
    width, bins = split.length_bins(max_length)
    end = width * len(bins)
    labels, line = [(0.0, "0"), (1.0, f"{end:,}")], ""
    if max_length <= end:
        x = max_length / end * _WIDTH
        line = f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{_BASE}"/>'
        if x > 0.7 * _WIDTH:
            del labels[-1]  # the two labels would overlap
        labels.append((x / _WIDTH, f"max_length {max_length:,}"))
    over = [index * width >= max_length for index in range(len(bins))]
    lengths = ", ".join(f"{name} {split.percentile(share):,}" for name, share in PERCENTILES.items())
    histogram = _bars("Histogram of the lengths of examples", bins, over, labels, line)
    return f'{histogram}<div class="dim">before truncation: {lengths}</div>'


def _share_histogram(split: SplitReport) -> str:
    bins = split.rows.target_shares.tolist()
    labels = [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")]
    text = f'<div class="dim">{split.target_share:.1%} of all tokens are target tokens</div>'
    return _bars("Histogram of the shares of target tokens", bins, [False] * len(bins), labels) + text


def _bars(
    title: str, bins: Sequence[int], is_over: Sequence[bool], labels: Sequence[tuple[float, str]], extra: str = ""
) -> str:
    """Return a histogram as SVG.

    Args:
        title: description for readers who cannot see the histogram.
        bins: count of each bin.
        is_over: whether each bin is above the limit and therefore drawn in another color.
        labels: position, as a fraction of the width, and text of each label of the horizontal axis.
        extra: further SVG elements.
    """
    step, largest = _WIDTH / len(bins), max(1, *bins)
    drawn = []
    for index, count in enumerate(bins):
        if count:
            height = max(1.5, count / largest * (_BASE - 8))
            color = "over" if is_over[index] else "bar"
            drawn.append(
                f'<rect class="{color}" x="{index * step + 0.5:.1f}" y="{_BASE - height:.1f}" '
                f'width="{max(step - 1, 0.6):.1f}" height="{height:.1f}"><title>{count:,}</title></rect>'
            )
    for place, text in labels:
        anchor = "start" if place < 0.15 else "end" if place > 0.85 else "middle"
        drawn.append(f'<text x="{place * _WIDTH:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(drawn)}{extra}</svg>'


def _languages(split: SplitReport) -> str:
    total = max(1, sum(split.rows.languages.values()))
    listed = split.rows.languages.most_common(_MAX_LANGUAGES)
    rows = [
        f'<tr><td>{escape(name)}</td><td class="right">{_percent(count / total)}</td></tr>'
        f'<tr><td colspan="2"><div class="track"><div style="width: {100 * count / total:.1f}%"></div></div></td></tr>'
        for name, count in listed
    ]
    rest = len(split.rows.languages) - len(listed)
    more = f'<div class="dim">and {rest} more</div>' if rest > 0 else ""
    return f"<table>{''.join(rows)}</table>{more}"


def _percent(fraction: float) -> str:
    return "&lt; 0.1%" if 0 < fraction < 0.0005 else f"{fraction:.1%}"


def _findings(split: SplitReport) -> list[str]:
    findings = split.rows.findings
    sections = []
    for kind in findings.by_severity():
        count, places = findings.counts[kind], findings.places[kind]
        rows = "".join(map(_place, places))
        more = f'<div class="dim">and {count - len(places):,} more</div>' if count > len(places) else ""
        opened = " open" if kind.severity != "note" else ""
        sections.append(
            f'<details class="{kind.severity}"{opened}><summary><em>{kind.severity}</em><b>{kind.name}</b>'
            f'<span class="dim">{count:,}</span></summary><div class="dim">{escape(kind.remedy)}</div>'
            f"<table>{rows}</table>{more}</details>"
        )
    return sections or ['<div class="card" style="color: var(--ok)">nothing found</div>']


def _place(finding: Finding) -> str:
    text = escape(finding.excerpt).replace(HIT[0], "<mark>").replace(HIT[1], "</mark>")
    return f'<tr><td class="place">{escape(str(finding.location))}</td><td><code>{text}</code></td></tr>'


def _samples(split: SplitReport, tokenizer: Any) -> list[str]:
    legend = (
        '<p class="dim"><span class="target">green</span>: target tokens, every second token underlined; ⏎ is a line '
        "break in the target</p>"
    )
    shown = []
    for example in split.rows.samples:
        title = f"{example.location}: {len(example.tokens):,} tokens, {int(example.loss_mask.sum()):,} target tokens"
        text = _colored(style_row(example, tokenizer))
        shown.append(f'<div class="card sample"><h3>{escape(title)}</h3><pre tabindex="0">{text}</pre></div>')
    return [legend, *shown]


def _colored(text: Text) -> str:
    """Return the first 4,000 characters of the styled text of a row as HTML spans."""
    classes = {CONTEXT_STYLE: "context", TARGET_STYLES[0]: "target", TARGET_STYLES[1]: "target second"}
    pieces, end = [], 0
    for span in text.spans:
        start, last = min(span.start, _MAX_TEXT), min(span.end, _MAX_TEXT)
        pieces.append(escape(text.plain[end:start]))
        if start < last:
            name = classes.get(str(span.style), "name")
            pieces.append(f'<span class="{name}">{escape(text.plain[start:last])}</span>')
        end = max(end, last)
    return "".join(pieces) + ("…" if len(text.plain) > _MAX_TEXT else "")

"""Draw line charts as HTML: a stretchable SVG for the lines, and HTML text for the labels of the axes.

The SVG has no fixed aspect ratio, so a chart fills a page of any width. The size of the labels does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from paddlenlp_ext.report.templates import fill

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 1000.0, 300.0
"""Size of a chart in SVG units."""
_MAX_POINTS = 600
_FEWEST_SMOOTHED = 20
_FRACTION_SMOOTHED = 20
_OUTLIER = 3.0
_PADDING = 0.05


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        name: name in the legend.
        points: (x, y) in ascending order of x.
        style: CSS classes of the line: "raw", "main", "dots" (a point at each value), "run1" to "run6".
        shown: whether the legend lists the line.
    """

    name: str
    points: Points
    style: str = "main"
    shown: bool = True


@dataclass(frozen=True)
class Mark:
    """Vertical mark at a value of x, such as a resumed step; `style` is a CSS class: "best", "resume" or "bad"."""

    x: float
    name: str
    style: str


@dataclass(frozen=True)
class Chart:
    """Line chart; lines without points are left out.

    Attributes:
        title: heading of the chart.
        lines: lines, drawn in order.
        marks: vertical marks.
        unit: unit of the values, shown next to the title.
        limit: value and name of a horizontal line, such as max_grad_norm; None: no line.
        x_range: first and last x; None: from the points.
        from_zero: whether the y axis begins at 0; for values that are not negative.
    """

    title: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    unit: str = ""
    limit: tuple[float, str] | None = None
    x_range: tuple[float, float] | None = None
    from_zero: bool = False

    def render(self) -> Markup:
        """Return the HTML of the chart; an empty string if no line has points."""
        lines = [line for line in self.lines if line.points]
        if not lines:
            return Markup("")
        values = [y for line in lines for _, y in line.points]
        low, high, is_cut = _value_range(values, self.from_zero)
        ticks = [tick for tick in _ticks(low, high) if low <= tick <= high]
        xs = [x for line in lines for x, _ in line.points]
        first, last = self.x_range or (min(xs), max(xs))
        span = max(last - first, 1e-9)

        def place(x: float, y: float) -> tuple[float, float]:
            inside = min(max(y, low), high)
            return WIDTH * (x - first) / span, HEIGHT * (1 - (inside - low) / max(high - low, 1e-300))

        def x_percent(x: float) -> float:
            return 100 * (x - first) / span

        return fill(
            "line_chart.html",
            chart=self,
            width=WIDTH,
            height=HEIGHT,
            drawn=[(line, _path(thinned(line.points), place)) for line in lines],
            dots=[(line, [(*place(x, y), x, y) for x, y in line.points]) for line in lines if "dots" in line.style],
            marks=[(mark, x_percent(mark.x)) for mark in self.marks if first <= mark.x <= last],
            mark_names={mark.name: mark.style for mark in self.marks},
            limit_y=None if self.limit is None or not low < self.limit[0] <= high else place(0, self.limit[0])[1],
            y_ticks=[(100 * place(0, tick)[1] / HEIGHT, format_value(tick)) for tick in ticks],
            x_ticks=[(x_percent(tick), f"{tick:,.0f}") for tick in _step_ticks(first, last)],
            num_cut=sum(not low <= value <= high for value in values) if is_cut else 0,
            legend=[line for line in lines if line.shown],
            summary=_summary(lines),
        )


def smoothed(values: Sequence[float]) -> tuple[int, list[float]]:
    """Smooth values with a centered moving average, which has no lag.

    Returns:
        The window size of the moving average, and the averages. The window size is odd, at least 3, and about a
        twentieth of the number of values. Near both ends, the window is smaller. Fewer than 20 values are not smoothed,
        and the window size is 1.
    """
    if len(values) < _FEWEST_SMOOTHED:
        return 1, list(values)
    half = max(1, len(values) // _FRACTION_SMOOTHED // 2)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
    return 2 * half + 1, [(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def smoothed_line(points: Points, name: str, style: str = "main", shown: bool = True) -> Line:
    """Return the smoothed line of points; the name of a smoothed line includes the window size in steps."""
    count, values = smoothed([y for _, y in points])
    label = f"{name}, mean of {count} steps" if count > 1 else name
    return Line(label, [(x, y) for (x, _), y in zip(points, values, strict=True)], style, shown)


def thinned(points: Points) -> Points:
    """Reduce points to at most 1,200: keep the lowest and the highest point in each group of consecutive points.

    Up to 1,200 points are returned unchanged; more points form at most 600 groups.
    """
    if len(points) <= 2 * _MAX_POINTS:
        return points
    size = math.ceil(len(points) / _MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        extremes = {min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def format_value(value: float) -> str:
    """Return a value as text with at most four significant digits; from 1,000 up to 1,000,000, as an integer."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _path(points: Points, place: Callable[[float, float], tuple[float, float]]) -> str:
    if len(points) == 1:
        x, y = place(*points[0])
        return f"M{x:.1f} {y:.1f}h.01"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))


def _value_range(values: Iterable[float], from_zero: bool) -> tuple[float, float, bool]:
    """Return the range of the y axis, and whether the range excludes rare values far above all others."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[min(len(ordered) - 1, math.floor(0.98 * len(ordered)))]
    middle = ordered[len(ordered) // 2]
    is_cut = len(ordered) >= 50 and high - middle > _OUTLIER * max(usual - ordered[0], 1e-12)
    if is_cut:
        high = usual + 0.25 * (usual - low)
    if from_zero and low > 0:
        low = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero else low - margin), high + margin
    pad = _PADDING * (high - low)
    return (low if from_zero else low - pad), high + pad, is_cut


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return ticks that cover the range from `low` to `high`: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(start, end + 1)]


def _step_ticks(first: float, last: float) -> list[float]:
    if last - first < 1:
        return [first]
    ticks = [tick for tick in _ticks(first, last, 5) if first <= tick <= last and tick == round(tick)]
    gap = (last - first) * 0.08
    ticks = [tick for tick in ticks if tick - first > gap and last - tick > gap]
    return [first, *ticks, last]


def _summary(lines: Sequence[Line]) -> str:
    """Return a description of the lines for readers who cannot see the chart."""
    return "; ".join(
        f"{line.name} from {format_value(line.points[0][1])} at step {line.points[0][0]:.0f} "
        f"to {format_value(line.points[-1][1])} at step {line.points[-1][0]:.0f}"
        for line in lines
        if line.shown
    )

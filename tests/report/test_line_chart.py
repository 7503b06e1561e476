"""Line charts: smoothing, thinning and axes."""

from __future__ import annotations

import pytest

from paddlenlp_ext.report.line_chart import Chart, Line, format_value, smoothed, thinned


def test_smoothed_leaves_few_values_as_they_are():
    assert smoothed([3.0, 1.0]) == (1, [3.0, 1.0])


def test_smoothed_means_are_centered_and_do_not_lag():
    count, means = smoothed([float(value) for value in range(100)])
    assert count == 5
    assert means[2:-2] == pytest.approx(list(range(2, 98)))
    assert means[0] == pytest.approx(1.0) and means[-1] == pytest.approx(98.0)


def test_thinned_keeps_the_extremes_of_a_long_line():
    points = [(step, 0.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    assert len(thinned(points)) <= 1200 and (4321, 9.0) in thinned(points)


def test_chart_without_points_is_empty():
    assert Chart("Loss", [Line("training", [])]).render() == ""


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(5, 0.0), (9, 0.0)]])
def test_chart_of_one_or_equal_values_is_drawn(points):
    assert "nan" not in (page := Chart("Loss", [Line("training", points)]).render()) and "<path" in page


def test_chart_draws_rare_high_values_at_the_edge_and_says_so():
    points = [(step, 1 + step % 7 / 10) for step in range(100)]
    points[50] = (50, 500.0)
    assert "1 value beyond the axis" in Chart("Gradient norm", [Line("norm", points)]).render()


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (2.54321, "2.543"), (0.00002, "2e-05"), (12345.6, "12,346")])
def test_format_value_is_short(value, text):
    assert format_value(value) == text


def test_chart_marks_each_value_of_a_line_of_dots():
    chart = Chart("Loss", [Line("dev", [(5, 2.0), (10, 1.0), (15, 1.5)], "dots run2")]).render()
    assert chart.count('class="dot dots run2"') == 3 and "step 10: 1<" in chart

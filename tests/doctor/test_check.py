"""Results of checks."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.doctor.check import Check, Difference, relative_difference, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import CPU_TARGETS


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([[1.0, 2.0]], [[1.0, 4.0]], 0.5),
        ([[1.0], [1.1]], [[1.0], [1.0]], 0.1),
        ([[np.nan]], [[1.0]], np.inf),
        ([[]], [[]], 0.0),
    ],
)
def test_relative_difference_is_relative_to_the_largest_value(actual, expected, difference):
    arrays = [list(map(np.array, each)) for each in (actual, expected)]
    assert relative_difference(*arrays).relative == pytest.approx(difference)


def test_relative_difference_names_the_place_of_the_largest():
    expected = [np.array([[1.0, -2.0], [3.0, 4.0]]), np.array([5.0])]
    actual = [np.array([[1.0, -2.0], [3.5, 4.0]]), np.array([5.1])]
    assert relative_difference(actual, expected).place == "result 1 at [1, 0] of [2, 2]: 3.5 instead of 3"
    actual[1][0] = np.nan
    assert relative_difference(actual, expected, ["loss", "norm"]).place == "norm: nan instead of 5"


def test_relative_difference_of_other_shapes_raises_value_error():
    with pytest.raises(ValueError, match=r"result 1 has shape \[2\]; the reference has shape \[1, 2\]"):
        relative_difference([np.zeros(2)], [np.zeros([1, 2])])


def test_run_checks_leaves_out_what_does_not_exist_and_fails_nan():
    checks = [Check("ops", name, CPU_TARGETS[0], 0.1, lambda value=value: value) for name, value in VALUES.items()]
    assert {result.check.name: result.passed for result in run_checks(checks)} == {
        "near": True,
        "far": False,
        "nan": False,
    }


VALUES = {
    "near": Difference(0.1, ""),
    "absent": None,
    "far": Difference(0.2, ""),
    "nan": Difference(float("nan"), ""),
}

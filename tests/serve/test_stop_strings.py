"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

import pytest

from paddlenlp_ext.serve.stop_strings import StopStrings


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "found"),
    [
        (["###"], ["a#", "#b", "##", "#c"], ["a", "##b", "", ""], True),
        (["ab", "b"], ["xa", "b"], ["x", ""], True),
        (["end", "e"], ["th", "en"], ["th", ""], True),
        (["xyz"], ["x", "xy", "y"], ["", "x", "xyy"], False),
        ([], ["x"], ["x"], False),
    ],
)
def test_stop_strings_hold_back_only_what_may_be_a_stop(stops, parts, shown, found):
    search = StopStrings(stops)
    results = [search.add(part) for part in parts]
    assert [text for text, _ in results] == shown
    assert [is_found for _, is_found in results] == [False] * (len(parts) - 1) + [found]
    assert search.finish() == ""

"""Events of an answer, and stop texts."""

from __future__ import annotations

import pytest

from paddlenlp_ext.serve.choices import Choice, StopTexts


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
def test_stop_texts_hold_back_only_what_may_be_a_stop(stops, parts, shown, found):
    search = StopTexts(stops)
    results = [search.add(part) for part in parts]
    assert [text for text, _ in results] == shown
    assert [is_found for _, is_found in results] == [False] * (len(parts) - 1) + [found]
    assert search.finish() == ""


def test_choice_shows_held_text_at_the_end(models):
    """End with a beginning of the stop text, which is then no stop text."""
    model, events = models.by_name["base"], []
    choice = Choice(0, model.decode, ["bcd"], events.append)
    assert not any(choice.on_token(token, None) for token in model.tokenizer("abc")["input_ids"])
    choice.on_end("length")
    assert [event.text for event in events] == ["a", "", "", "bc"]
    assert (events[-1].finish_reason, sum(event.num_tokens for event in events)) == ("length", 3)

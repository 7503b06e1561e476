"""Deltas of a choice."""

from __future__ import annotations

from paddlenlp_ext.serve.choice_deltas import Choice


def test_choice_shows_held_text_at_the_end(models):
    """End with a beginning of the stop text, which is then no stop text."""
    model, events = models.by_name["base"], []
    choice = Choice(0, model.decode, ["bcd"], events.append)
    assert not any(choice.on_token(token, None) for token in model.tokenizer("abc")["input_ids"])
    choice.on_end("length")
    assert [event.text for event in events] == ["a", "", "", "bc"]
    assert (events[-1].finish_reason, sum(event.num_tokens for event in events)) == ("length", 3)

"""Text of an answer from its tokens, and stop texts."""

from __future__ import annotations

import pytest

from paddlenlp_ext.serve.choices import Choice, StopTexts, TextDecoder


def test_text_decoder_writes_complete_characters_only(models):
    tokenizer = models.by_name["base"].tokenizer
    text = "aé早🙂."
    decoder = TextDecoder(tokenizer)
    parts = [decoder.add(token) for token in tokenizer(text)["input_ids"]]
    assert parts == ["a", "", "é", "", "", "早", "", "", "", "🙂", "."]
    assert [decoder.add(tokenizer("é")["input_ids"][0]), decoder.finish(), decoder.finish()] == ["", "\ufffd", ""]


class SpacedTokenizer:
    """Tokenizer that writes a space between tokens, as those of words do."""

    def decode(self, tokens, **options):
        return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize(("context", "expected"), [((), "w1 w2 w3"), ((7, 8), " w1 w2 w3")])
def test_text_decoder_continues_its_context(context, expected):
    decoder = TextDecoder(SpacedTokenizer(), context)
    assert "".join(decoder.add(token) for token in (1, 2, 3)) + decoder.finish() == expected


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
    tokenizer, events = models.by_name["base"].tokenizer, []
    choice = Choice(0, tokenizer, ["bcd"], events.append)
    assert not any(choice.on_token(token, None) for token in tokenizer("abc")["input_ids"])
    choice.on_end("length")
    assert [event.text for event in events] == ["a", "", "", "bc"]
    assert (events[-1].finish_reason, sum(event.num_tokens for event in events)) == ("length", 3)

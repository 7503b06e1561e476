"""Texts that a tokenizer cannot encode are errors that name the text."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from paddlenlp_ext.data.rows.conversation import ASSISTANT, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.data.templates.text_encoder import TextEncoder, check_characters
from tests.data.tiny_tokenizers import CHATML, MARKED, make_tokenizer


def test_encode_text_at_which_the_regular_expression_gives_up_names_the_text():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    with pytest.raises(ValueError, match=r"cannot encode 'xxxx.*of 40 characters: Onig.*over; change the text"):
        TextEncoder(tokenizer).encode(["a", "x" * 40], [False, False])


@pytest.mark.parametrize("text", [CHATML, MARKED], ids=["chatml", "marked"])
def test_render_template_that_writes_a_lone_surrogate_raises_invalid_row_error(text):
    half = "{% if messages[0].content == 'a' %}{{ '\\ud83d' }}{% endif %}"
    template = JinjaTemplate(text + half, make_tokenizer(bos="<s>", eos="<|im_end|>"))
    with pytest.raises(InvalidRowError, match=r"chat template: .* unpaired surrogate U\+D83D at character"):
        template.render(Conversation((Message(USER, "a"), Message(ASSISTANT, "b"))))


def test_check_characters_names_the_position_of_a_surrogate():
    with pytest.raises(InvalidRowError, match=r"U\+DC00 at character 3, after 'aüb'; remove it"):
        check_characters("aüb\udc00c")


def test_encode_text_with_a_lone_surrogate_names_its_position():
    with pytest.raises(InvalidRowError, match=r"U\+D83D at character 1, after 'a'"):
        TextEncoder(make_tokenizer()).encode(["b", "a\ud83d"], [False, False])

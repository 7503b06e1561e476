"""Token ids equal the ids of transformers; texts that a tokenizer cannot encode are errors that name the text."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.data.rows.conversation import ASSISTANT, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
from paddlenlp_ext.data.templates.text_encoder import TextEncoder, check_characters
from tests.data.tiny_tokenizers import CHATML, MARKED, make_tokenizer


def test_encode_text_at_which_the_regular_expression_gives_up_names_the_text():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    with pytest.raises(
        ValueError, match=r"cannot encode a text of 40 characters that begins with 'xxxx.*: Onig.*over; change the text"
    ):
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


@pytest.mark.parametrize("splits_special", [False, True])
def test_encode_with_other_settings_of_the_backend_returns_the_ids_of_transformers(splits_special):
    """Test settings that an earlier call of the tokenizer may have left."""
    texts = ["Was ist 2 + 2?<|im_end|>", "", " vier\n", "Grüße, 你好"]
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    tokenizer.split_special_tokens = splits_special
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert (len(expected[0]) > len(tokenizer(texts[0][:14])["input_ids"])) == splits_special
    encoder, backend = TextEncoder(tokenizer), tokenizer.backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.encode_special_tokens = not splits_special
    assert encoder.encode(texts, [False] * len(texts)) == expected


def test_encode_with_a_tokenizer_class_that_changes_texts_calls_the_class():
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **options):
            return super()._encode_plus([each.lower() for each in text] if isinstance(text, list) else text, **options)

    tokenizer = Lower(tokenizer_object=make_tokenizer().backend_tokenizer)
    assert TextEncoder(tokenizer).encode(["Das IST"], [False]) == TextEncoder(make_tokenizer()).encode(
        ["das ist"], [False]
    )

"""Wrong values in tokenizer_config.json."""

from __future__ import annotations

import json
import re

import pytest

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.checkpoint.tokenizer_config import check_tokenizer_config
from tests.data.tiny_tokenizers import make_tokenizer
from tests.stress.wrong_values import OF_OTHER_TYPE, places, replaced, value_at

TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": True,
    "add_prefix_space": False,
    "bos_token": dict(TOKEN),
    "eos_token": "</s>",
    "pad_token": None,
    "padding_side": "left",
    "additional_special_tokens": ["<a>", dict(TOKEN)],
    "extra_special_tokens": [dict(TOKEN)],
    "added_tokens_decoder": {"0": dict(TOKEN)},
    "chat_template": "{{ messages }}",
    "model_max_length": 1e30,
    "unknown_key": [1],
}


def written(folder, config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_check_tokenizer_config_value_of_another_type_raises_with_its_key(tmp_path):
    check_tokenizer_config(written(tmp_path, CONFIG))
    for path in places(CONFIG):
        value = value_at(CONFIG, path)
        for wrong in OF_OTHER_TYPE.get(type(value), ()):
            is_token = value == TOKEN and isinstance(wrong, str) and path[0] != "added_tokens_decoder"
            if path[0] == "unknown_key" or is_token or (path[0] == "chat_template" and wrong == []):
                continue
            named = re.escape(f"{tmp_path}/tokenizer_config.json")
            with pytest.raises(ValueError, match=named) as caught:
                check_tokenizer_config(written(tmp_path, replaced(CONFIG, path, wrong)))
            assert str(path[0]) in str(caught.value), (path, wrong)


def test_load_tokenizer_flag_written_as_a_string_raises(tmp_path):
    """transformers judges a flag by its truth: "false" would add the token."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    with pytest.raises(ValueError, match=r"add_bos_token in .* must be true or false, or null, got 'false'"):
        load_tokenizer(written(tmp_path, {**config, "add_bos_token": "false"}))

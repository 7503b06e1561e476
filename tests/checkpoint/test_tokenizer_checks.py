"""Wrong values in tokenizer_config.json, and components of tokenizer.json that make a text longer, are refused."""

from __future__ import annotations

import base64
import json
import re

import pytest

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.checkpoint.tokenizer_checks import check_tokenizer_files
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


def test_check_tokenizer_files_value_of_another_type_raises_with_its_key(tmp_path):
    check_tokenizer_files(written(tmp_path, CONFIG))
    for path in places(CONFIG):
        value = value_at(CONFIG, path)
        for wrong in OF_OTHER_TYPE.get(type(value), ()):
            is_token = value == TOKEN and isinstance(wrong, str) and path[0] != "added_tokens_decoder"
            if path[0] == "unknown_key" or is_token or (path[0] == "chat_template" and wrong == []):
                continue
            named = re.escape(f"{tmp_path}/tokenizer_config.json")
            with pytest.raises(ValueError, match=named) as caught:
                check_tokenizer_files(written(tmp_path, replaced(CONFIG, path, wrong)))
            assert str(path[0]) in str(caught.value), (path, wrong)


def test_load_tokenizer_flag_written_as_a_string_raises(tmp_path):
    """transformers judges a flag by its truth: "false" would add the token."""
    make_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    with pytest.raises(ValueError, match=r"add_bos_token in .* must be true or false, or null, got 'false'"):
        load_tokenizer(written(tmp_path, {**config, "add_bos_token": "false"}))


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


def charsmap(longest):
    trie = b"\0" * 8
    texts = b"a\0" + b"b" * longest + b"\0c\0"
    charsmap = base64.b64encode(len(trie).to_bytes(4, "little") + trie + texts).decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


SPACE = replace({"String": " "}, "▁")
DOUBLE = replace({"String": "a"}, "aa")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("name", "component", "growth"),
    [
        ("normalizer", sequence(*[DOUBLE] * 8), 256),
        ("normalizer", sequence(sequence(*[DOUBLE] * 4), sequence(*[DOUBLE] * 4)), 256),
        ("normalizer", {"normalizers": [{"pattern": {"String": "a"}, "content": "ü" * 70}]}, 140),
        ("normalizer", replace({"String": "abc"}, "a" * 400), 134),
        ("normalizer", replace({"Regex": ""}, "a" * 128), 129),
        ("normalizer", sequence(SPACE, charsmap(60)), 180),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 200}, 200),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 8}, 256),
        ("decoder", {"type": "Sequence", "decoders": [DOUBLE] * 8}, 256),
    ],
)
def test_check_tokenizer_files_with_component_that_grows_names_it_and_growth(name, component, growth, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({name: component}))
    with pytest.raises(ValueError, match=f"tokenizer.json: {name} may make a text {growth} times longer"):
        check_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        sequence({"type": "Prepend", "prepend": "▁"}, SPACE),  # Llama 2
        sequence(charsmap(33), replace({"Regex": " {2,}"}, " ")),  # SentencePiece's NFKC
        sequence({"type": "NFKC"}, {"type": "Lowercase"}, replace({"String": "``"}, '"'), replace({"String": "a"}, "")),
        [1, "x", {"precompiled_charsmap": 3, "pattern": None}],  # left to tokenizers
    ],
)
def test_check_tokenizer_files_with_known_normalizers_accepts_them(normalizer, tmp_path):
    content = {"normalizer": normalizer, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer_files(tmp_path)


def test_load_tokenizer_with_normalizer_that_grows_refuses_it(tmp_path):
    make_tokenizer(bos="<s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": sequence(*[DOUBLE] * 24)}))
    with pytest.raises(ValueError, match="normalizer may make a text 256 times longer"):
        load_tokenizer(tmp_path)

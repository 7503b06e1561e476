"""Check the types of values in tokenizer_config.json, because `transformers` does not check them."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.json_schema import (
    FLAG,
    OBJECT,
    TEXT,
    Kind,
    check_values,
    either,
    kinds_by_key,
    list_of,
    number,
    object_of,
    one_of,
)

FILE = "tokenizer_config.json"
_TOKEN = either(TEXT, OBJECT)
_TOKENS = list_of(_TOKEN)

KEYS: dict[str, Kind] = kinds_by_key(
    (TEXT.or_null(), "tokenizer_class backend"),
    (
        FLAG.or_null(),
        "add_bos_token add_eos_token add_prefix_space legacy split_special_tokens clean_up_tokenization_spaces "
        "do_lower_case use_default_system_prompt",
    ),
    (_TOKEN.or_null(), "bos_token eos_token unk_token pad_token sep_token cls_token mask_token"),
    (one_of("left", "right").or_null(), "padding_side truncation_side"),
    (_TOKENS.or_null(), "additional_special_tokens"),
    (either(_TOKENS, object_of(_TOKEN)).or_null(), "extra_special_tokens"),
    (either(TEXT, list_of(OBJECT)).or_null(), "chat_template"),
    (number(above=0, maximum=1e32).or_null(), "model_max_length"),  # 1e30: no limit
    (OBJECT.or_null(), "added_tokens_decoder"),
)
TOKEN_KEYS: dict[str, Kind] = kinds_by_key((TEXT, "content"), (FLAG, "lstrip normalized rstrip single_word special"))
"""Keys of a token in object form."""


def check_tokenizer_config(folder: Path) -> None:
    """Check tokenizer_config.json if the file exists.

    Raises:
        ValueError: the file is damaged or a value is invalid; the message names the file, the key and the value.
    """
    file = folder / FILE
    if not file.is_file():
        return
    config = read_json_object(file)
    check_values(config, KEYS, str(file))
    for name, tokens in config.items():
        if name == "added_tokens_decoder":
            for index, token in (tokens or {}).items():
                _check_token(token, f"added_tokens_decoder.{index} in {file}")
        elif name in KEYS and isinstance(tokens, dict) and name.endswith("_token"):
            _check_token(tokens, f"{name} in {file}")
        elif name in ("additional_special_tokens", "extra_special_tokens") and isinstance(tokens, list):
            for index, token in enumerate(tokens):
                if isinstance(token, dict):
                    _check_token(token, f"{name}[{index}] in {file}")


def _check_token(token: object, place: str) -> None:
    if not isinstance(token, dict) or "content" not in token:
        raise ValueError(f'{place} must be an object with "content"')
    check_values(token, TOKEN_KEYS, place)

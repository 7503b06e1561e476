"""Which chat template a run uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.jinja_template import JinjaTemplate
from paddlenlp_ext.data.plain_template import PlainTemplate
from paddlenlp_ext.data.turns import ChatTemplate

__all__ = ["ChatTemplate", "load_template"]


def load_template(option: str | None, tokenizer: Any) -> ChatTemplate:
    """The template that `chat_template` asks for.

    Args:
        option: None for the tokenizer's own (and no template where it has none), "none", or the path of a Jinja file
            or of a JSON file that holds `chat_template`.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: no such file, nothing usable in it, or a tokenizer without an end token.
    """
    if option == "none" or (option is None and not tokenizer.chat_template):
        return PlainTemplate(tokenizer)
    text = tokenizer.get_chat_template() if option is None else _read_template(Path(option).expanduser())
    return JinjaTemplate(text, tokenizer)


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f'chat_template is {str(path)!r}, which is no file; give a Jinja file, "none" or null')
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return text
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: {error.msg}") from error
    if not isinstance(content, dict) or not isinstance(content.get("chat_template"), str):
        raise ValueError(f'{path}: a JSON template file holds {{"chat_template": "... Jinja ..."}}')
    return content["chat_template"]

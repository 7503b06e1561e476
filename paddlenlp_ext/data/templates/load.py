"""Load the chat template that the key `chat_template` selects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.templates.base import ChatTemplate, TemplateOptions
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.json_reader import JsonError, Location, read_document
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.data")

_MAX_FILE_BYTES = 1 << 22
FILE_NAMES = ("chat_template.jinja", "chat_template.json")
_SAVED = "training_chat_template"
"""Key of tokenizer_config.json whose value is the template of the training run, in the format of chat_template.json."""


def load_template(option: str | None, tokenizer: Any, options: TemplateOptions | None = None) -> ChatTemplate:
    """Load the template that the key `chat_template` selects.

    Args:
        option: None for the template of the tokenizer, "none" for no template, or the path of a Jinja file, a JSON file
            (`{"chat_template": "...Jinja..."}`, or PaddleNLP's keys `system`, `conversation` and `query`), or a
            directory with `chat_template.jinja` or `chat_template.json`.
        tokenizer: a Hugging Face tokenizer.
        options: variables of a Jinja template, and options for the loss mask of reasoning.

    Raises:
        ValueError: the file is missing or not a template, the tokenizer has no end token, the template does not use a
            variable in `options.kwargs`, or `options` needs a Jinja template and the template is not Jinja.
    """
    return _checked(_load(option, tokenizer, options or TemplateOptions()), options)


def _checked(template: ChatTemplate, options: TemplateOptions | None) -> ChatTemplate:
    """Return the template after checking that it supports the options.

    Raises:
        ValueError: the options require a Jinja template, and the template is not Jinja.
    """
    if options is not None and not template.writes_messages:
        if options.kwargs:
            raise ValueError("chat_template_kwargs: only Jinja templates have variables; remove the key")
        if options.mask_reasoning:
            raise ValueError("mask_reasoning: only Jinja templates write reasoning; remove the key")
    return template


def load_configured_template(config: DataConfig, tokenizer: Any) -> ChatTemplate:
    """Return the template that the data section of a run configuration selects, with its options.

    Raises:
        ValueError: see `load_template`.
    """
    return load_template(config.chat_template, tokenizer, TemplateOptions.from_config(config))


def load_training_template(config: DataConfig, tokenizer: Any) -> ChatTemplate:
    """Return the configured template of a training run, and make the tokenizer save the template.

    Without `chat_template`, the template is the tokenizer's own, and the tokenizer is unchanged. If the template is not
    Jinja, the tokenizer is saved without chat_template.jinja.

    Raises:
        ValueError: see `load_template`.
    """
    template = load_configured_template(config, tokenizer)
    if config.chat_template is None or config.autoregressive:
        return template
    tokenizer.init_kwargs.pop(_SAVED, None)
    if template.writes_messages:
        tokenizer.chat_template = template.text
        tokenizer.init_kwargs[_SAVED] = {"chat_template": template.text}
        return template
    logger.info(
        "chat_template %s: not Jinja, so the tokenizer is saved without chat_template.jinja; the programs of this "
        "library can render prompts with this template, but transformers and vLLM cannot",
        config.chat_template,
    )
    tokenizer.chat_template = None
    if config.chat_template != "none":
        tokenizer.init_kwargs[_SAVED] = json.loads(template.text)
    return template


def choose_template(config: DataConfig, tokenizer: Any, template: ChatTemplate | None = None) -> ChatTemplate:
    """Return the template that renders the rows of a run.

    Plain-text training (`autoregressive`) uses the template without markers. Otherwise, the result is `template`, or
    the configured template if `template` is None.
    """
    if config.autoregressive:
        return PlainTemplate(tokenizer)
    return template or load_configured_template(config, tokenizer)


def load_saved_template(folder: Path, tokenizer: Any, options: TemplateOptions) -> ChatTemplate | None:
    """Return the template of the training run from a saved model or adapter; None if no template was saved.

    Raises:
        ValueError: see `load_template`.
    """
    file = folder / "tokenizer_config.json"
    content = read_json_object(file).get(_SAVED) if file.is_file() else None
    if content is None:
        return None
    return _checked(_from_json(content, file, json.dumps(content), tokenizer, options), options)


def _load(option: str | None, tokenizer: Any, options: TemplateOptions) -> ChatTemplate:
    if option == "none" or (option is None and not tokenizer.chat_template):
        return PlainTemplate(tokenizer)
    from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate

    if option is None:
        return JinjaTemplate(tokenizer.get_chat_template(), tokenizer, options)
    return _load_file(_find(Path(option).expanduser()), tokenizer, options)


def _load_file(path: Path, tokenizer: Any, options: TemplateOptions) -> ChatTemplate:
    """Return the template in a file: Jinja, JSON with a Jinja template, or JSON in PaddleNLP's format."""
    from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate

    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(
            f"{path}: more than {_MAX_FILE_BYTES >> 20} MiB, too large for a chat template; choose another file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error
    if path.suffix != ".json":
        return JinjaTemplate(text, tokenizer, options)
    try:
        content = read_document(text)
    except JsonError as error:
        raise ValueError(f"{error.location(Location(str(path), 1, 1))}: {error}") from error
    return _from_json(content, path, text, tokenizer, options)


def _from_json(content: Any, path: Path, text: str, tokenizer: Any, options: TemplateOptions) -> ChatTemplate:
    """Return the template in a parsed JSON document; `text` is the source text of the document."""
    from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate
    from paddlenlp_ext.data.templates.paddlenlp import PaddleNLPTemplate, is_paddlenlp_template

    if is_paddlenlp_template(content):
        return PaddleNLPTemplate(content, path, text, tokenizer)
    if isinstance(content, dict) and isinstance(content.get("chat_template"), str):
        return JinjaTemplate(content["chat_template"], tokenizer, options)
    raise ValueError(
        f'{path}: not a chat template; write {{"chat_template": "...Jinja..."}} or '
        '{"system": ..., "conversation": ..., "query": ...}'
    )


def _find(path: Path) -> Path:
    candidates = [path / name for name in FILE_NAMES] if path.is_dir() else [path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        looked_for = " or ".join(map(str, candidates))
        raise ValueError(f'chat_template: no file {looked_for}; use the path of a file, "none" or null')
    return found

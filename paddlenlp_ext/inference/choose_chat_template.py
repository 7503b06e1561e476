"""Choose the chat template of a model: the requested template, or the template of the training run or tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paddlenlp_ext.data.templates.base import ChatTemplate, TemplateOptions
from paddlenlp_ext.data.templates.load import load_saved_template, load_template
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger("paddlenlp_ext.predict")


def choose_template(
    arguments: ModelArguments, folders: Sequence[str | None], tokenizer: PreTrainedTokenizerBase
) -> ChatTemplate:
    """Load the requested chat template, else the training run's template, else the tokenizer's template.

    `--chat_template_kwargs` apply to every template. Without `--chat_template` and `--chat_template_kwargs`, the values
    of the training run apply.

    Args:
        arguments: `--chat_template` and `--chat_template_kwargs`.
        folders: folders that may hold the run_config.json of the training run; the first file found is used.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the template of the training run was not saved, and its file no longer exists; or the template is
            invalid.
    """
    runs = [Path(folder).expanduser() / "run_config.json" for folder in folders if folder is not None]
    run = next((path for path in runs if path.is_file()), None)
    settings = {} if run is None else read_json_object(run)
    kwargs = arguments.chat_template_kwargs or {}
    if arguments.chat_template is None and arguments.chat_template_kwargs is None:
        kwargs = settings.get("chat_template_kwargs") or {}
    options = TemplateOptions(kwargs)
    if kwargs:
        logger.info("chat_template_kwargs: %s", json.dumps(kwargs, ensure_ascii=False))
    if arguments.chat_template is not None or run is None:
        logger.info("chat template: %s", arguments.chat_template or "the tokenizer's own (no run_config.json found)")
        return load_template(arguments.chat_template, tokenizer, options)
    key = "autoregressive" if settings.get("autoregressive") else "chat_template"
    option = "none" if key == "autoregressive" else settings.get(key)
    saved = load_saved_template(run.parent, tokenizer, options) if option not in (None, "none") else None
    if saved is not None:
        logger.info("chat template of the training run, saved in %s", run.parent)
        return saved
    if option not in (None, "none") and not Path(option).expanduser().exists():
        raise ValueError(f"{run}: the {key} of the training run, {option}, no longer exists; pass --chat_template FILE")
    logger.info("chat template: %s, as in training (%s in %s)", option or "the tokenizer's own", key, run)
    return load_template(option, tokenizer, options)

"""Models that the server offers: a base and adapters over it, each with its tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.inference.chat_template import choose_template
from paddlenlp_ext.inference.load_model import find_model_and_adapter, find_source, load_base, load_tokenizer
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.mixed_batches import AdapterGroups
from paddlenlp_ext.serve.arguments import ServeArguments
from paddlenlp_ext.serve.errors import ApiError
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

logger = get_logger("paddlenlp_ext.serve")


@dataclass(frozen=True)
class ServedModel:
    """Model as clients name it.

    Attributes:
        name: name for clients, and of the adapter in the engine.
        tokenizer: a Hugging Face tokenizer.
        template: chat template.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    tokenizer: Any
    template: ChatTemplate
    eos_token_ids: frozenset[int]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class ModelSet:
    """All models of the server.

    Attributes:
        groups: the models as the engine runs them.
        by_name: models by their names, the base first.
        base: name of the base model, whether it is served or not.
        max_total_length: maximum number of tokens of a prompt and its answer.
    """

    groups: AdapterGroups
    by_name: Mapping[str, ServedModel]
    base: str
    max_total_length: int

    def find(self, name: str) -> ServedModel:
        """Return the model that a request names.

        Raises:
            ApiError: there is none (404).
        """
        if name not in self.by_name:
            known = f"{did_you_mean(name, self.by_name)} Known: {', '.join(self.by_name)}"
            raise ApiError(404, f"model: there is no model {name[:100]!r}{known}", "model_not_found", "model")
        return self.by_name[name]


def load_models(arguments: ServeArguments) -> ModelSet:
    """Load the base, all adapters, and their tokenizers and templates.

    Raises:
        ValueError: a model, adapter, tokenizer or template cannot be used, or the adapters need different bases.
    """
    base, own_adapter = find_model_and_adapter(arguments)
    folders = arguments.adapters or ({} if own_adapter is None else {Path(own_adapter).resolve().name: own_adapter})
    found = {name: find_source(base, folder) for name, folder in folders.items()}
    _check_same_base({name: (source, options) for name, (source, _, options) in found.items()})
    source, _, options = next(iter(found.values()), find_source(base, None))
    stored = {name: files for name, (_, files, _) in found.items() if files is not None}
    serves_base = not any(_prepares_base(files, options) for files in stored.values())
    if not serves_base and len(stored) > 1:
        raise ValueError(
            f"--lora_path {', '.join(folders)}: an adapter changes the base before it is quantized, so that the others "
            "do not fit; serve it alone"
        )
    base_name = arguments.base_name if arguments.base_name not in folders else base
    names = {**({base_name: None} if serves_base else {}), **folders}
    tokenizers = {name: load_tokenizer(base, folder) for name, folder in names.items()}
    templates = {name: choose_template(arguments, [folder, base], tokenizers[name]) for name, folder in names.items()}
    model = load_base(arguments, source, options)
    served = {}
    for name, tokenizer in tokenizers.items():
        ends = {*model.eos_token_ids, *templates[name].stop_token_ids, tokenizer.eos_token_id} - {None}
        served[name] = ServedModel(name, tokenizer, templates[name], frozenset(ends))
    limit = arguments.max_total_length or model.config.max_context
    if limit > model.config.max_context:
        raise ValueError(
            f"--max_total_length {limit} exceeds the model's context of {model.config.max_context} tokens; lower it"
        )
    return ModelSet(AdapterGroups(model, stored), served, base_name, limit)


def _check_same_base(found: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> None:
    """Check that all adapters were trained over the same base."""
    first: tuple[str, Any, Any] | None = None
    for name, (source, options) in found.items():
        own = (name, dict(source.config_overrides), options["quantization_config"])
        if first is None:
            first = own
        elif own[1:] != first[1:]:
            raise ValueError(
                f"--lora_path {name}: this adapter was trained over another form of the base than {first[0]} "
                f"(settings {own[1]} and {first[1]}, quantization {own[2]} and {first[2]}); serve them separately"
            )


def _prepares_base(files: AdapterFiles, options: Mapping[str, Any]) -> bool:
    """Return whether an adapter was trained over a base that it changed before the quantization."""
    changes = type(files.config).before_quantizing is not PeftConfig.before_quantizing
    return changes and options["quantization_config"] is not None

"""Models of the server: a base model and its adapters, each with its tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.generation.grammar import GrammarCompiler, GrammarState
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import find_model_and_adapter, find_source, load_base, load_tokenizer
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.mixed_batches import AdapterGroups
from paddlenlp_ext.serve.arguments import ServeArguments
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.response_format_field import AnswerFormat
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

logger = get_logger("paddlenlp_ext.serve")


@dataclass(frozen=True)
class ServedModel:
    """Base model or adapter that clients can select.

    Attributes:
        name: name that clients and the engine use.
        tokenizer: a Hugging Face tokenizer.
        template: the chat template.
        eos_token_ids: tokens that end an answer.
        vocab_size: size of the model's vocabulary.
    """

    name: str
    tokenizer: Any
    template: ChatTemplate
    eos_token_ids: frozenset[int]
    vocab_size: int

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the prompt ids of a conversation.

        Raises:
            ApiError: the chat template cannot render the conversation.
        """
        try:
            return self.template.encode_prompt(conversation)
        except ValueError as error:
            path = ".".join(map(str, error.path)) if isinstance(error, InvalidRowError) else ""
            raise invalid(path or "messages", str(error)) from None

    def encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the ids of prompts, which are strings or token ids.

        Raises:
            ApiError: a prompt is empty, or has ids outside the vocabulary.
        """
        encoded = []
        for prompt in prompts:
            ids = list(self.tokenizer(prompt, verbose=False)["input_ids"]) if isinstance(prompt, str) else prompt
            if not ids:
                raise invalid("prompt", "the prompt is empty; send at least one token")
            if not 0 <= min(ids) <= max(ids) < self.vocab_size:
                found = f"token ids from {min(ids)} to {max(ids)}"
                raise invalid("prompt", f"there are {found}, but the vocabulary has {self.vocab_size} tokens")
            encoded.append(ids)
        return encoded

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer)

    def compile(self, form: AnswerFormat) -> GrammarState:
        """Return the grammar state at the start of an answer.

        Raises:
            ApiError: see `GrammarCompiler.compile`.
        """
        try:
            return self._compiler.compile(form.grammar)
        except ValueError as error:
            raise form.error(error) from None

    def prompt_texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """Return the text of each prompt, including special tokens."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [each if isinstance(each, str) else self.tokenizer.decode(each, **options) for each in prompts]


@dataclass(frozen=True)
class ModelCatalog:
    """Tokenizers, templates and limits of all models of the server.

    Attributes:
        by_name: model name -> model. The base model, if it is served, is first.
        base: name of the base model, even if only an adapter is served.
        max_total_length: maximum number of tokens of a prompt and its answer together.
    """

    by_name: Mapping[str, ServedModel]
    base: str
    max_total_length: int

    def find(self, name: str) -> ServedModel:
        """Return the model that a request names.

        Raises:
            ApiError: no served model has this name (404).
        """
        if name not in self.by_name:
            known = f"{did_you_mean(name, self.by_name)} Known: {', '.join(self.by_name)}"
            raise ApiError(404, f"model: there is no model {name[:100]!r}{known}", "model_not_found", "model")
        return self.by_name[name]

    def entry(self, name: str, created: int) -> dict[str, Any]:
        """Return the entry of a model in the list of /v1/models; `created` is a time in seconds since 1970."""
        parent = None if name == self.base else self.base
        return {"id": name, "object": "model", "created": created, "owned_by": "paddlenlp-ext", "parent": parent}


@dataclass(frozen=True)
class ModelSet:
    """All models of the server.

    Attributes:
        groups: the base model with its adapters, for the engine.
        catalog: tokenizers, templates and limits.
    """

    groups: AdapterGroups
    catalog: ModelCatalog

    @property
    def by_name(self) -> Mapping[str, ServedModel]:
        """Model name -> model, as in the catalog."""
        return self.catalog.by_name


def load_models(arguments: ServeArguments) -> ModelSet:
    """Load the base model, all adapters, and their tokenizers and chat templates.

    Raises:
        ValueError: a model, adapter, tokenizer or template cannot be used, the adapters need different settings of the
            base, or `--max_total_length` exceeds the model's context.
    """
    base, own_adapter = find_model_and_adapter(arguments)
    folders = arguments.adapters or ({} if own_adapter is None else {Path(own_adapter).resolve().name: own_adapter})
    found = {name: find_source(base, folder) for name, folder in folders.items()}
    _check_same_base({name: (source, options) for name, (source, _, options) in found.items()})
    source, _, options = next(iter(found.values()), find_source(base, None))
    stored = {name: files for name, (_, files, _) in found.items() if files is not None}
    preparing = next((name for name, files in stored.items() if _prepares_base(files, options)), None)
    serves_base = preparing is None
    if not serves_base and len(stored) > 1:
        raise ValueError(
            f"--lora_path: {preparing} changes the base before quantization, so the base does not match the other "
            f"adapters ({', '.join(name for name in stored if name != preparing)}); serve {preparing} alone"
        )
    base_name = arguments.base_name if arguments.base_name not in folders else base
    names = {**({base_name: None} if serves_base else {}), **folders}
    tokenizers = {name: load_tokenizer(base, folder) for name, folder in names.items()}
    templates = {name: choose_template(arguments, [folder, base], tokenizers[name]) for name, folder in names.items()}
    model = load_base(arguments, source, options)
    served = {}
    for name, tokenizer in tokenizers.items():
        ends = {*model.eos_token_ids, *templates[name].stop_token_ids, tokenizer.eos_token_id} - {None}
        served[name] = ServedModel(name, tokenizer, templates[name], frozenset(ends), model.config.vocab_size)
    limit = arguments.max_total_length or model.config.max_context
    if limit > model.config.max_context:
        raise ValueError(
            f"--max_total_length {limit} exceeds the model's context of {model.config.max_context} tokens; lower it"
        )
    return ModelSet(AdapterGroups(model, stored), ModelCatalog(served, base_name, limit))


def _check_same_base(found: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> None:
    """Check that all adapters were trained with the same settings and quantization of the base model."""
    first: tuple[str, Any, Any] | None = None
    for name, (source, options) in found.items():
        own = (name, dict(source.config_overrides), options["quantization_config"])
        if first is None:
            first = own
        elif own[1:] != first[1:]:
            raise ValueError(
                f"--lora_path: the adapters {first[0]} and {name} were trained on different configurations of the base "
                f"model (settings {first[1]} and {own[1]}, quantization {first[2]} and {own[2]}); serve each adapter "
                "alone"
            )


def _prepares_base(files: AdapterFiles, options: Mapping[str, Any]) -> bool:
    """Return whether the adapter's method changed the base model before quantization."""
    changes = type(files.config).before_quantizing is not PeftConfig.before_quantizing
    return changes and options["quantization_config"] is not None

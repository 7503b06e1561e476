"""Program llm/predict/predictor.py: answer a file of rows, or chat in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.cli.chat import chat
from paddlenlp_ext.cli.predict_arguments import PredictorArguments
from paddlenlp_ext.cli.predict_file import PredictionRow, check_output_file, predict_file
from paddlenlp_ext.cli.predict_resume import IncompleteFile, digest, files_state
from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt, read_prompts
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.generation.grammar import GrammarCompiler, GrammarError, GrammarState
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import (
    context_length,
    find_model_and_adapter,
    find_source,
    load_model,
    load_static,
    load_tokenizer,
)
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.predict")


def predict(arguments: PredictorArguments) -> None:
    """Answer the rows of `--data_file`, or chat in the terminal if it is unset.

    Raises:
        ValueError: a model, adapter, template or file cannot be used. Rows are checked before the model is loaded.
    """
    if arguments.data_file is not None:
        check_output_file(arguments.output_file, arguments.data_file)
    base, adapter = find_model_and_adapter(arguments)
    if arguments.mode == "dynamic":
        arguments = arguments.fit_context(context_length(find_source(base, adapter)[0].config))
    questions = None if arguments.data_file is None else read_prompts(arguments.data_file)
    tokenizer = load_tokenizer(base, adapter)
    template = choose_template(arguments, [adapter, base], tokenizer)
    grammar = compile_grammar(arguments, tokenizer)
    rows: list[PredictionRow] = []
    inputs: dict[str, Any] = {}
    if questions is not None:
        rows = prediction_rows(arguments, questions, template)
        inputs = run_inputs(arguments, base, adapter, rows)
        IncompleteFile(arguments.output_file, inputs).check()
    model = load_predictor(arguments, base, adapter)
    model.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
    options: dict[str, Any] = {**arguments.decoding_options(), "eos_token_id": model.eos_token_ids, "grammar": grammar}

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    if questions is not None:
        options |= {"batch_size": arguments.batch_size, "inputs": inputs}
        predict_file(model, rows, decode, arguments.output_file, **options)
        logger.info("answers written to %s", arguments.output_file)
        return

    def encode_prompt(question: str, history: Sequence[tuple[str, str]]) -> list[int]:
        prompt = Prompt(Conversation.asking(question, history, arguments.system), None)
        ids, was_truncated = encode_truncated_prompt(template, prompt, arguments.src_length)
        if was_truncated:
            logger.warning("the oldest turns, or the end of the message, exceed --src_length and are left out")
        return ids

    chat(model, encode_prompt, decode, **options)


def compile_grammar(arguments: PredictorArguments, tokenizer: Any) -> GrammarState | None:
    """Return the grammar for `--json_schema` or `--regex`; None for free text.

    Raises:
        ValueError: the schema or pattern cannot be used, or llguidance is not installed.
    """
    try:
        grammar = arguments.answer_grammar()
        return None if grammar is None else GrammarCompiler(tokenizer).compile(grammar)
    except GrammarError as error:
        source = (
            f"--regex {arguments.regex}" if arguments.json_schema is None else f"--json_schema {arguments.json_schema}"
        )
        raise ValueError(f"{source}: {error}") from error


def prediction_rows(
    arguments: PredictorArguments, questions: Sequence[Prompt], template: ChatTemplate
) -> list[PredictionRow]:
    """Encode the prompts of a data file; rows without a system prompt get `--system`.

    Raises:
        ValueError: see `encode_prompts`.
    """
    if arguments.system is not None:
        questions = [question.with_system(arguments.system) for question in questions]
    prompts = encode_prompts(template, questions, arguments.src_length)
    return [PredictionRow(ids, each.src, each.tgt) for ids, each in zip(prompts, questions, strict=True)]


def encode_prompts(template: ChatTemplate, questions: Sequence[Prompt], src_length: int) -> list[list[int]]:
    """Return the ids of each prompt; log how many prompts were truncated to `src_length` tokens.

    Raises:
        ValueError: the template cannot render a row, or a prompt exceeds `src_length` even without its question.
    """
    encoded = []
    for number, question in enumerate(questions, start=1):
        try:
            encoded.append(encode_truncated_prompt(template, question, src_length))
        except InvalidRowError as error:
            raise ValueError(f"data_file: row {number}: {error}") from error
    num_truncated = sum(was_truncated for _, was_truncated in encoded)
    if num_truncated:
        logger.warning(
            "%d of %d prompts were truncated to --src_length %d tokens", num_truncated, len(encoded), src_length
        )
    return [ids for ids, _ in encoded]


def load_predictor(arguments: PredictorArguments, base: str, adapter: str | None) -> Any:
    """Load the model with its adapter merged where possible, or the static graph of `--mode static`.

    Raises:
        ValueError: `load_model` or `load_static` raises a ValueError, or prompt and answer may exceed the model's
            context.
    """

    def check(config: Mapping[str, Any]) -> None:
        check_context(arguments, config)

    if arguments.mode == "static":
        exported = load_static(arguments, base, arguments.model_prefix, arguments.quant_type)
        check(exported.config.source)
        return exported
    return load_model(arguments, base, adapter, arguments.quant_type, check)


def check_context(arguments: PredictorArguments, config: Mapping[str, Any]) -> None:
    """Check the requested lengths against the model's context, including its rope scaling.

    Raises:
        ValueError: prompt and answer together may exceed the context.
    """
    longest = context_length(config)
    total = arguments.src_length + arguments.max_length
    if longest is not None and total > longest:
        raise ValueError(
            f"--src_length {arguments.src_length} and --max_length {arguments.max_length} make {total} tokens, more "
            f"than the model's context of {longest} (max_position_embeddings, scaled); lower one of the lengths"
        )


def run_inputs(
    arguments: PredictorArguments, base: str, adapter: str | None, rows: Sequence[PredictionRow]
) -> dict[str, Any]:
    """Return all inputs that the answers depend on; an interrupted run can continue only with equal inputs.

    Model files are compared by name, size and modification time.
    """
    folders = [ModelSource.resolve(base).path] + ([] if adapter is None else [Path(adapter).expanduser()])
    return {
        "model_name_or_path": str(folders[0]),
        "lora_path": None if adapter is None else str(folders[1].resolve()),
        "files of the model": [files_state(folder) for folder in folders],
        "dtype": arguments.dtype,
        "mode": arguments.mode,
        "model_prefix": arguments.model_prefix,
        "quant_type": arguments.quant_type,
        "data_file, template or src_length": digest([[[*row.prompt_ids], row.src, row.tgt] for row in rows]),
        "json_schema, regex": digest(arguments.answer_grammar()),
        **arguments.decoding_options(),
    }

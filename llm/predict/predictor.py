"""Answer a file of rows, or chat, with a model or a fine-tuned one: `python llm/predict/predictor.py --help`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_ext._runtime import configure_runtime
from paddlenlp_ext.cli.predict_arguments import PredictorArguments, parse_arguments
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.process import run_command

if TYPE_CHECKING:
    from paddlenlp_ext.data.prompts import Question
    from paddlenlp_ext.data.templates import ChatTemplate

logger = get_logger("paddlenlp_ext.predict")


def main(argv: Sequence[str]) -> None:
    """Read the command line, load, answer."""
    arguments = parse_arguments(argv)  # before Paddle is imported: a mistyped argument is answered at once
    from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
    from paddlenlp_ext.cli.chat import chat
    from paddlenlp_ext.data.prompts import read_questions

    if arguments.data_file is not None:
        from paddlenlp_ext.cli.predict import check_output_file

        check_output_file(arguments.output_file, arguments.data_file)
    base, adapter = find_model_and_adapter(arguments)
    questions = read_questions(arguments.data_file) if arguments.data_file else None
    tokenizer = AutoTokenizer.from_pretrained(adapter if adapter and has_tokenizer(adapter) else base)
    template = choose_template(arguments.chat_template, [adapter, base], tokenizer)
    prompts = None if questions is None else encode_all(template, questions, arguments.src_length)
    model = load_model(arguments, base, adapter)
    model.add_eos_token_ids({*template.stop_token_ids, tokenizer.eos_token_id} - {None})
    options = {**arguments.decoding_options(), "eos_token_id": model.end_token_ids}

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    if questions is not None and prompts is not None:
        answer_file(model, questions, prompts, decode, arguments, options)
        return

    def encode_prompt(question: str, history: Sequence[tuple[str, str]]) -> list[int]:
        from paddlenlp_ext.data.prompts import Question, encode_question

        return encode_question(template, Question(question, tuple(history), None, None), arguments.src_length)[0]

    chat(model, encode_prompt, decode, **options)


def find_model_and_adapter(arguments: PredictorArguments) -> tuple[str, str | None]:
    """The base model's name and the adapter's folder, if there is one.

    An adapter folder given as the model is the adapter; its base is the one it names, or its run's.

    Raises:
        ValueError: an adapter without a base or with one that is not there, or two adapters.
    """
    from paddlenlp_ext.checkpoint.hub import resolve_base

    named = Path(arguments.model_name_or_path).expanduser()
    if not (named / "adapter_config.json").is_file() or (named / "config.json").is_file():
        if (named / "adapter_config.json").is_file() and not arguments.adapter_path:
            logger.warning("%s holds a model and an adapter: the model answers; --lora_path adds the adapter", named)
        return arguments.model_name_or_path, arguments.adapter_path
    if arguments.adapter_path:
        raise ValueError(f"--model_name_or_path {named} is an adapter itself: name its base there.")
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("run_config.json", "model_name_or_path")):
        base = json.loads((named / file).read_text(encoding="utf-8")).get(key) if (named / file).is_file() else None
        if base:
            resolve_base(base, named, f"--model_name_or_path BASE --lora_path {named}")
            return base, str(named)
    raise ValueError(f"{named} does not name its base model: give --model_name_or_path BASE --lora_path {named}.")


def has_tokenizer(folder: str) -> bool:
    """Whether a run saved its tokenizer beside its adapter."""
    return (Path(folder).expanduser() / "tokenizer_config.json").is_file()


def choose_template(asked: str | None, folders: Sequence[str | None], tokenizer: Any) -> ChatTemplate:
    """The chat template asked for, else the one that the model was trained with, else the tokenizer's own.

    Args:
        asked: `--chat_template`.
        folders: where the training may have left its run_config.json, the nearest first.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: the template is not where it was.
    """
    from paddlenlp_ext.data.templates import load_template

    runs = [Path(folder).expanduser() / "run_config.json" for folder in folders if folder is not None]
    run = next((path for path in runs if path.is_file()), None)
    if asked is not None or run is None:
        logger.info("chat template: %s", asked or "the tokenizer's own (no run_config.json says otherwise)")
        return load_template(asked, tokenizer)
    settings = json.loads(run.read_text(encoding="utf-8"))
    key = "autoregressive" if settings.get("autoregressive") else "chat_template"
    option = "none" if key == "autoregressive" else settings.get(key)
    if option not in (None, "none") and not Path(option).expanduser().exists():
        raise ValueError(f"{run}: the {key} of the training, {option}, is no longer there; give --chat_template FILE.")
    logger.info("chat template: %s, as in training (%s in %s)", option or "the tokenizer's own", key, run)
    return load_template(option, tokenizer)


def encode_all(template: ChatTemplate, questions: Sequence[Question], src_length: int) -> list[list[int]]:
    """Prompt ids of every question; those that had to be cut are counted in the log."""
    from paddlenlp_ext.data.prompts import encode_question

    encoded = [encode_question(template, question, src_length) for question in questions]
    num_cut = sum(was_cut for _, was_cut in encoded)
    if num_cut:
        logger.warning("%d of %d prompts were cut to --src_length %d tokens", num_cut, len(encoded), src_length)
    return [ids for ids, _ in encoded]


def load_model(arguments: PredictorArguments, base: str, adapter: str | None) -> Any:
    """The model in its number format on its device, the adapter folded into its weights where the method allows it.

    A base that was quantized in training is quantized again, unless it is stored so.

    Raises:
        ValueError: a device that is not there, a number format that the device lacks, prompts and answers longer than
            the model's context.
    """
    import paddle

    from paddlenlp_ext.models.auto import AutoModelForCausalLM
    from paddlenlp_ext.models.model_source import ModelSource
    from paddlenlp_ext.peft.merge.files import choose_device
    from paddlenlp_ext.peft.peft_model import PeftModel
    from paddlenlp_ext.peft.save_and_load import read_adapter
    from paddlenlp_ext.quantization.model import quantization_report

    choose_device(arguments.device or "auto")
    dtype = choose_dtype(arguments.dtype, paddle.get_device())
    source = ModelSource.resolve(base)
    check_context(arguments, source.config)
    options: dict[str, Any] = {"dtype": dtype, "use_flash_attention": arguments.use_flash_attention}
    stored = None if adapter is None else read_adapter(adapter)
    if stored is not None:
        options |= {
            "quantization_config": stored.base_quantization(source.config),
            "before_quantizing": stored.before_quantizing,
        }
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    if model.quantization is not None:
        logger.info("%s", quantization_report(model))
    if stored is None:
        return model
    adapted = PeftModel.from_files(model, stored)
    # Merged, a quantized base would take its full size again.
    return adapted.merge_and_unload() if adapted.peft_config.mergeable and model.quantization is None else adapted


def choose_dtype(asked: str | None, device: str) -> str:
    """The number format of the weights.

    Raises:
        ValueError: nothing multiplies in that format on this CPU.
    """
    from paddlenlp_ext.ops.cpu import bf16

    if device != "cpu":
        return asked or "bfloat16"
    if asked == "float16":
        raise ValueError("--dtype float16 is not available on the CPU; use float32 or bfloat16.")
    if asked == "bfloat16" and bf16.unavailable_reason() is not None:
        raise ValueError(f"--dtype bfloat16 is not available on this CPU: {bf16.unavailable_reason()}; use float32.")
    return asked or "float32"


def check_context(arguments: PredictorArguments, config: dict[str, Any]) -> None:
    """Compare the lengths asked for with what the model was made for, scaled as its config says.

    Raises:
        ValueError: they are longer.
    """
    from paddlenlp_ext.models.config import DecoderConfig

    if config.get("max_position_embeddings") is None:
        return
    longest = DecoderConfig.from_dict(config).rope.longest_context
    wanted = arguments.src_length + arguments.max_length
    if wanted > longest:
        raise ValueError(
            f"--src_length {arguments.src_length} and --max_length {arguments.max_length} make {wanted} tokens, more "
            f"than the model's context of {longest} (max_position_embeddings, scaled): lower one of them."
        )


def answer_file(
    model: Any,
    questions: Sequence[Question],
    prompts: Sequence[list[int]],
    decode: Any,
    arguments: PredictorArguments,
    options: dict[str, Any],
) -> None:
    """Answer every question of the data file into the output file."""
    from paddlenlp_ext.cli.predict import PredictionRow, predict_file

    pairs = zip(questions, prompts, strict=True)
    rows = [PredictionRow(prompt, question.src, question.tgt) for question, prompt in pairs]
    predict_file(model, rows, decode, arguments.output_file, batch_size=arguments.batch_size, **options)
    logger.info("written: %s", arguments.output_file)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)

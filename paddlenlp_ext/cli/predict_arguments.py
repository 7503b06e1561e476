"""The command line of llm/predict/predictor.py: PaddleNLP's arguments, what this project has not taken up refused.

Names, meanings and defaults are PaddleNLP's, so that its command lines run unchanged; except that `device` and `dtype`
need not be given. Imports no Paddle: a mistyped argument is answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

from paddlenlp_ext.generation.options import DecodingOptions
from paddlenlp_ext.utils.distributed_env import world_size
from paddlenlp_ext.utils.registry import nearest


def _argument(default: Any, kind: type, help_text: str) -> Any:
    metadata = {"kind": kind, "help": help_text}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class PredictorArguments:
    """What can be chosen. `max_length` counts new tokens alone, as in PaddleNLP."""

    model_name_or_path: str = _argument(MISSING, str, "model folder, .gguf file, built-in name, hub id or adapter")
    lora_path: str | None = _argument(None, str, "folder of an adapter of any method")
    prefix_path: str | None = _argument(None, str, "the same as --lora_path, for prefix tuning")
    data_file: str | None = _argument(None, str, "rows to answer, one JSON object a line; none: chat in the terminal")
    output_file: str = _argument("output.json", str, 'where the lines {"src", "tgt", "output"} go')
    chat_template: str | None = _argument(
        None, str, "Jinja or JSON file, or none; default: the training's, else the tokenizer's own"
    )
    src_length: int = _argument(1024, int, "most tokens of a prompt; a longer one is cut")
    max_length: int = _argument(1024, int, "most new tokens")
    total_max_length: int = _argument(4096, int, "most tokens of prompt and answer together")
    batch_size: int = _argument(1, int, "prompts decoded together")
    decode_strategy: str = _argument("sampling", str, "sampling or greedy_search")
    top_k: int = _argument(0, int, "draw among so many likeliest tokens; 0: among all")
    top_p: float = _argument(0.7, float, "draw among the likeliest tokens that reach this probability")
    temperature: float = _argument(0.95, float, "below 1 more certain, above 1 more varied")
    repetition_penalty: float = _argument(1.0, float, "above 1 makes tokens already seen less likely")
    seed: int = _argument(0, int, "of the draws")
    device: str | None = _argument(None, str, "cpu, gpu, gpu:1, ...; default: a GPU where there is one")
    dtype: str | None = _argument(None, str, "float32, bfloat16 or float16; default: float32 on the CPU, else bfloat16")
    use_flash_attention: bool = _argument(True, bool, "fast attention kernels where there are some")

    @property
    def adapter_path(self) -> str | None:
        """The adapter's folder, whichever argument named it."""
        return self.lora_path or self.prefix_path

    def decoding_options(self) -> dict[str, Any]:
        """The arguments of `generate` that say how tokens are chosen.

        Raises:
            ValueError: one of them is out of range.
        """
        names = ("decode_strategy", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
        options = {name: getattr(self, name) for name in names}
        options |= {"max_new_tokens": self.max_length, "max_total_length": self.total_max_length}
        DecodingOptions(**options)
        return options


# PaddleNLP's arguments that have no effect here, each with the value that asks for nothing.
_ONLY_NEUTRAL: dict[str, Any] = {
    "mode": "dynamic",
    "model_prefix": "model",
    "model_type": None,
    "min_length": 1,
    "inference_model": False,
    "quant_type": None,
    "export_precache": False,
    "avx_model": False,
    "avx_type": None,
    "avx_cachekv_type": "fp16",
    "avx_mode": False,
    "benchmark": False,
    "use_fake_parameter": False,
    "block_attn": False,
    "append_attn": False,
    "block_size": 64,
    "cachekv_int8_type": None,
    "speculate_method": None,
    "speculate_max_draft_token_num": 1,
    "speculate_max_ngram_size": 1,
    "speculate_verify_window": 2,
    "speculate_max_candidate_len": 5,
    "draft_model_name_or_path": None,
    "draft_model_quant_type": None,
    "num_beams": 1,
    "tensor_parallel_degree": 1,
}
_DTYPES = ("float32", "bfloat16", "float16")
_TRUE, _FALSE, _NONE = ("true", "1", "yes"), ("false", "0", "no"), ("none", "null", "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(argv: Sequence[str]) -> PredictorArguments:
    """Read the command line.

    Raises:
        ValueError: an unknown argument (the nearest known one is named), a value of the wrong type or out of range, or
            an argument that asks for what is not available yet; or a launcher started several processes.
    """
    parser = _Parser(prog="predictor.py", allow_abbrev=False, description="Answer a file of rows, or chat.")
    for argument in fields(PredictorArguments):
        kind, default = argument.metadata["kind"], None if argument.default is MISSING else argument.default
        parser.add_argument(
            f"--{argument.name}",
            type=_boolean if kind is bool else kind,
            default=default,
            required=argument.default is MISSING,
            nargs="?" if kind is bool else None,
            const=True if kind is bool else None,
            help=f"{argument.metadata['help']}{'' if default is None else f' (default: {default})'}".replace("%", "%%"),
        )
    for name in _ONLY_NEUTRAL:
        parser.add_argument(f"--{name}", nargs="?", const="true", help=argparse.SUPPRESS)
    parsed, unknown = parser.parse_known_args(_joined_by_underscores(argv))
    _refuse_unknown(unknown)
    if world_size() > 1:  # each would answer every row, and write to the file in which the others write
        raise ValueError(
            f"{world_size()} processes were started, and answering takes one: start it without the launcher, or with "
            "--nproc_per_node 1."
        )
    values = vars(parsed)
    _refuse_not_available({name: values.pop(name) for name in _ONLY_NEUTRAL})
    return _checked(PredictorArguments(**{name: _unset(value) for name, value in values.items()}))


def _joined_by_underscores(argv: Sequence[str]) -> list[str]:
    """Both `--top_p` and `--top-p` are understood."""
    spelled = []
    for word in argv:
        name, equals, value = word.partition("=")
        is_name = word.startswith("--")
        spelled.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if is_name else word)
    return spelled


def _boolean(text: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _unset(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("null", "") else value


def _refuse_unknown(words: Sequence[str]) -> None:
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not words:
        return
    if not names:
        raise ValueError(f"{words[0]!r} belongs to no argument.")
    known = [argument.name for argument in fields(PredictorArguments)] + list(_ONLY_NEUTRAL)
    match = nearest(names[0].removeprefix("--"), known)
    raise ValueError(f"unknown argument {names[0]!r}{f'; did you mean --{match}?' if match else ''} (--help lists all)")


def _refuse_not_available(given: dict[str, str | None]) -> None:
    for name, text in given.items():
        neutral = _ONLY_NEUTRAL[name]
        accepted = {str(neutral).lower(), *(_NONE if neutral is None else ())}
        accepted |= set(_FALSE) if neutral is False else set()
        if text is not None and text.lower() not in accepted:
            shown = "leave it out" if neutral is None else f"leave it at {str(neutral).lower()}"
            raise ValueError(f"--{name} {text} is not available yet; {shown}.")


def _checked(arguments: PredictorArguments) -> PredictorArguments:
    if arguments.dtype not in (None, *_DTYPES):
        raise ValueError(f"--dtype {arguments.dtype} is not one of {', '.join(_DTYPES)}.")
    for name in ("src_length", "max_length", "total_max_length", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}: it must be at least 1.")
    if arguments.lora_path and arguments.prefix_path:
        raise ValueError("--lora_path and --prefix_path are both given: one adapter at a time.")
    arguments.decoding_options()
    wanted = arguments.src_length + arguments.max_length
    if wanted > arguments.total_max_length:
        raise ValueError(
            f"--src_length {arguments.src_length} and --max_length {arguments.max_length} make {wanted} tokens, "
            f"more than --total_max_length {arguments.total_max_length}: lower the two or raise the third."
        )
    return arguments

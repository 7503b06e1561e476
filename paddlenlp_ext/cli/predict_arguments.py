"""Parse the command line of llm/predict/predictor.py, without the delay of importing Paddle.

Names, meanings and defaults of the arguments match PaddleNLP's, except that `device` and `dtype` are optional. An
argument that is not implemented is accepted only with the value that has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_ext.config.command_line import parse_arguments as parse_command_line
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.generation.decoding_options import DecodingOptions
from paddlenlp_ext.inference.arguments import NO_VALUE, QUANT_TYPES, ModelArguments
from paddlenlp_ext.utils.distributed_env import require_single_process
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

if TYPE_CHECKING:
    from paddlenlp_ext.generation.grammar import Grammar

USAGE = "predictor.py --model_name_or_path MODEL [--key value ...]\n\nAnswer a file of rows, or chat in the terminal."

_NGRAMS = "inference_with_reference"  # PaddleNLP's name for speculative decoding with n-grams from prompt and answer


@dataclass(frozen=True, kw_only=True)
class PredictorArguments(ModelArguments):
    """Arguments of predictor.py; as in PaddleNLP, `max_length` counts new tokens only.

    Attributes:
        unset_lengths: `src_length` and `max_length`, if the command line does not set them.
    """

    prefix_path: str | None = option(
        None, help="adapter folder, same as --lora_path (PaddleNLP's key for prefix tuning)"
    )
    data_file: str | None = option(
        None, aliases=("data",), help="rows to answer, one JSON object per line; unset: chat in the terminal"
    )
    output_file: str = option(
        "output.json", aliases=("out",), help='output file, with a line {"src", "tgt", "output"} for each row'
    )
    src_length: int = option(
        1024,
        minimum=1,
        aliases=("max_prompt_length",),
        help="maximum number of tokens in a prompt; longer prompts are truncated",
    )
    max_length: int = option(
        1024, minimum=1, aliases=("max_new_tokens",), help="maximum number of new tokens in an answer"
    )
    total_max_length: int = option(
        4096, minimum=1, aliases=("max_total_length",), help="maximum number of tokens in prompt and answer together"
    )
    batch_size: int = option(1, minimum=1, help="number of prompts decoded together")
    min_length: int = option(0, minimum=0, help="minimum number of new tokens in an answer")
    system: str | None = option(None, help="system prompt of the chat, and of rows without a system prompt")
    decode_strategy: str = option("sampling", help="sampling, greedy_search or beam_search")
    num_beams: int = option(1, minimum=1, help="beam_search: number of beams, at least 2")
    length_penalty: float = option(
        1.0, help="beam_search: the score of a beam is divided by its length raised to this power"
    )
    top_k: int = option(0, help="top-k sampling: sample from the k most likely tokens; 0: from all tokens")
    top_p: float = option(
        0.7, help="nucleus sampling: sample from the fewest tokens whose total probability reaches this value"
    )
    temperature: float = option(0.95, help="softmax temperature; lower is more deterministic")
    repetition_penalty: float = option(
        1.0, help="penalty on tokens that have already occurred: above 1, these tokens become less likely"
    )
    seed: int = option(0, help="random seed for sampling")
    json_schema: str | None = option(None, help="file with a JSON schema; every answer conforms to the schema")
    regex: str | None = option(None, help="regular expression that every answer matches from start to end")
    mode: str = option(
        "dynamic",
        choices=("dynamic", "static"),
        help="static: model_name_or_path is a folder that export_model.py wrote",
    )
    model_prefix: str = option("model", help="with --mode static: name of the exported files, without suffix")
    quant_type: str | None = option(
        None,
        choices=QUANT_TYPES,
        help="format to quantize the linear layers to after merging; unset: keep the format of the loaded weights",
    )
    speculate_method: str | None = option(
        None,
        choices=(_NGRAMS, *NO_VALUE),
        help=f"{_NGRAMS}: draft tokens by n-gram lookup and verify several in one pass; needs batch_size 1",
    )
    speculate_max_draft_token_num: int = option(
        1, minimum=1, help="maximum number of draft tokens verified in one pass"
    )
    speculate_max_ngram_size: int = option(1, minimum=1, help="longest n-gram to look up")
    unset_lengths: tuple[str, ...] = ()

    @property
    def adapter_path(self) -> str | None:
        """Folder of the adapter, from `lora_path` or `prefix_path`."""
        return self.lora_path or self.prefix_path

    def fit_context(self, context: int | None) -> PredictorArguments:
        """Return the arguments; if their lengths exceed the context, lower the lengths that the user has not set.

        Args:
            context: maximum number of tokens of prompt and answer; None: no limit.
        """
        if context is None or not self.unset_lengths or self.src_length + self.max_length <= context:
            return self
        written = {"src_length", "max_length"}.difference(self.unset_lengths)
        share = (context - sum(getattr(self, name) for name in written)) // len(self.unset_lengths)
        if share < 1:
            return self
        get_logger().info(
            "%s set to %d, because the context has %d tokens", " and ".join(self.unset_lengths), share, context
        )
        return replace(self, **dict.fromkeys(self.unset_lengths, share))

    def decoding_options(self) -> dict[str, Any]:
        """Return the arguments of `generate` that control decoding.

        Raises:
            ValueError: an argument is out of range, or arguments contradict each other.
        """
        names = ("decode_strategy", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
        options = {name: getattr(self, name) for name in (*names, "num_beams", "length_penalty")}
        options |= {"max_new_tokens": self.max_length, "max_total_length": self.total_max_length}
        options["min_new_tokens"] = self.min_length
        if self.speculate_method == _NGRAMS:
            options["max_draft_tokens"] = self.speculate_max_draft_token_num
            options["max_ngram_size"] = self.speculate_max_ngram_size
        checked = DecodingOptions(**options)
        checked.check_batch_size(self.batch_size)
        for name in ("json_schema", "regex"):
            if getattr(self, name) is not None:
                checked.check_grammar(f"--{name}")
        return options

    def answer_grammar(self) -> Grammar | None:
        """Return the grammar of the answers; None for free text.

        Raises:
            ValueError: the schema file cannot be read, or llguidance is not installed.
        """
        from paddlenlp_ext.generation.grammar import json_schema_grammar, regex_grammar  # imports NumPy

        if self.json_schema is not None:
            return json_schema_grammar(read_json_object(Path(self.json_schema).expanduser()))
        return None if self.regex is None else regex_grammar(self.regex)


_NEUTRAL_VALUES: dict[str, Any] = {
    "model_type": None,
    "export_precache": False,
    "avx_model": False,
    "avx_type": None,
    "avx_cachekv_type": "fp16",
    "avx_mode": False,
    "benchmark": False,
    "use_fake_parameter": False,
    "cachekv_int8_type": None,
    "speculate_verify_window": 2,
    "speculate_max_candidate_len": 5,
    "draft_model_name_or_path": None,
    "draft_model_quant_type": None,
    "return_full_hidden_states": False,
    "mla_use_matrix_absorption": False,
    "weightonly_group_size": -1,
    "weight_block_size": "[128, 128]",
    "moe_quant_type": None,
    "output_via_mq": True,
    "dynamic_insert": False,
    "total_request_num": None,
    "tensor_parallel_degree": 1,
}
"""Arguments of PaddleNLP's predictor that are not implemented -> the value without effect."""


def _compat_key(name: str, neutral: Any) -> CompatKey:
    if neutral is None:
        return CompatKey(name, (None, *NO_VALUE), "leave it out", str)
    return CompatKey(name, (neutral,), f"leave it at {str(neutral).lower()}", type(neutral))


_OTHER_KERNELS = {"inference_model": False, "block_attn": False, "append_attn": False, "block_size": 64}
"""Argument that selects a CUDA kernel of PaddleNLP -> its default. All kernels give the same results."""


def kernel_keys(reason: str) -> tuple[CompatKey, ...]:
    """Return the arguments that select PaddleNLP's CUDA kernels; `reason` says why an argument has no effect."""
    return tuple(CompatKey(name, (value,), reason, type(value), "no effect") for name, value in _OTHER_KERNELS.items())


COMPAT_ARGUMENTS = (
    *(_compat_key(name, neutral) for name, neutral in _NEUTRAL_VALUES.items()),
    *kernel_keys("it only selects a CUDA kernel of PaddleNLP"),
)


def parse_arguments(argv: Sequence[str], usage: str = USAGE) -> PredictorArguments:
    """Parse the command line; `usage` is the beginning of the help text.

    Raises:
        ConfigError: arguments are unknown (the message suggests the nearest one), have an invalid value, or request an
            unimplemented feature.
        ValueError: arguments contradict each other, or a launcher started several processes.
    """
    values, notes = parse_command_line(argv, options_of(PredictorArguments, "arguments"), usage, COMPAT_ARGUMENTS)
    for note in notes:
        get_logger().info("%s", note)
    require_single_process("prediction")
    unset = tuple(name for name in ("src_length", "max_length") if name not in values)
    arguments = PredictorArguments(**values, unset_lengths=unset)
    _check(arguments)
    return arguments


def _check(arguments: PredictorArguments) -> None:
    if arguments.lora_path and arguments.prefix_path:
        raise ValueError("--lora_path and --prefix_path are both set; keep one, because a run has one adapter")
    if arguments.json_schema is not None and arguments.regex is not None:
        raise ValueError("--json_schema and --regex are both set; keep one, because an answer has one format")
    if arguments.min_length > arguments.max_length:
        raise ValueError(
            f"--min_length {arguments.min_length} is above --max_length {arguments.max_length}; change one of the two"
        )
    if arguments.mode == "static":
        _check_static(arguments)
    arguments.decoding_options()
    if arguments.speculate_method != _NGRAMS:
        _note_unused_speculation(arguments)
    total = arguments.src_length + arguments.max_length
    if total > arguments.total_max_length:
        raise ValueError(
            f"--src_length {arguments.src_length} and --max_length {arguments.max_length} make {total} tokens, "
            f"more than --total_max_length {arguments.total_max_length}; lower --src_length or --max_length, or raise "
            "--total_max_length"
        )


def _note_unused_speculation(arguments: PredictorArguments) -> None:
    for name in ("speculate_max_draft_token_num", "speculate_max_ngram_size"):
        if getattr(arguments, name) != 1:
            get_logger().warning("--%s has no effect without --speculate_method %s", name, _NGRAMS)


def _check_static(arguments: PredictorArguments) -> None:
    merged = "cannot be used, because the exported model contains its adapter; leave it out"
    reasons = {
        "lora_path": merged,
        "prefix_path": merged,
        "speculate_method": "needs logits of several positions, but exported models return only the last; leave it out",
    }
    for name, reason in reasons.items():
        if getattr(arguments, name) not in (None, *NO_VALUE):
            raise ValueError(f"--mode static: --{name} {reason}")

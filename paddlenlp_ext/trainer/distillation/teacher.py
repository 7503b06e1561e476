"""Teacher of a distillation: find its files, compare its vocabulary with the trained model's, and load its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 64


def teacher_source(options: DistillationConfig) -> ModelSource:
    """Find the files of the teacher.

    Raises:
        ValueError: the teacher does not exist or has no config.json.
    """
    assert options.teacher_model_name_or_path is not None, "the run has no teacher"
    algo = options.teacher_weight_quantize_algo
    quantization = None if algo is None else QuantizationConfig(algo=algo)
    with _named_errors():
        source = ModelSource.resolve(options.teacher_model_name_or_path, quantization=quantization)
        read_model_config(source.path)  # an error of a later read would not name the key
        return source


def teacher_context(options: DistillationConfig) -> int:
    """Return the context of the teacher in positions, after RoPE scaling.

    Raises:
        ValueError: the teacher does not exist, or its architecture is unknown.
    """
    source = teacher_source(options)
    with _named_errors():
        return DecoderConfig.from_dict(source.config).max_context


def load_teacher(source: ModelSource, config: RunConfig) -> CausalLM:
    """Load the frozen teacher in evaluation mode.

    Raises:
        ValueError: the weights cannot be loaded.
    """
    with _named_errors():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=teacher_dtype(config.precision), use_flash_attention=config.model.use_flash_attention
        )
    for parameter in model.parameters():
        parameter.stop_gradient = True
    logger.info("teacher: %s, loaded in %s", source.name, model.dtype_name)
    return model


def teacher_dtype(precision: PrecisionConfig) -> str:
    """Return the dtype of the teacher's matrices: the compute dtype, or float32 if the CPU cannot multiply in it."""
    on_cpu = capabilities(precision.device).cpp
    return "float32" if on_cpu and bf16.unavailable_reason() is not None else precision.compute_dtype


def check_vocabulary(source: ModelSource, tokenizer: Any) -> None:
    """Check that the tokenizers of teacher and trained model map the same tokens to the same ids.

    Raises:
        ValueError: the vocabularies differ, or the teacher has no tokenizer.
    """
    with _named_errors():
        own, other = tokenizer.get_vocab(), load_tokenizer(source.tokenizer_path).get_vocab()
    if own == other:
        return
    different = sorted((id_, token) for token, id_ in own.items() if other.get(token) != id_)
    different = different or sorted((id_, token) for token, id_ in other.items() if token not in own)
    id_, token = different[0]
    raise ValueError(
        f"teacher_model_name_or_path: {source.name} has another vocabulary than the trained model ({len(other):,} and "
        f"{len(own):,} tokens; the first difference is token {id_}, {token!r}); choose a teacher with the same "
        "tokenizer"
    )


def teacher_fingerprint(source: ModelSource, precision: PrecisionConfig) -> str:
    """Return a hash of the teacher's files, quantization and dtypes.

    The hash covers the content of config.json, and the size and parts of each weight file, so that large files are not
    read completely.
    """
    digest = hashlib.blake2b(digest_size=16)
    settings = [source.quantization and source.quantization.describe(), precision.compute_dtype]
    digest.update(json.dumps([source.config, *settings], sort_keys=True).encode())
    for file in _weight_files(source.path):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Begin the messages of errors in reading the teacher with its key, because the student's files have the same."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"teacher_model_name_or_path: {error}") from error


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".bin", ".gguf", ".pdparams"))


def _blocks(file: Path) -> Iterator[bytes]:
    """Yield evenly spaced blocks of a file."""
    size = file.stat().st_size
    step = max(_BLOCK_BYTES, size // _NUM_BLOCKS)
    with file.open("rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            yield stream.read(_BLOCK_BYTES)

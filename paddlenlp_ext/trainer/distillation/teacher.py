"""Teacher of a distillation: find its files, compare its vocabulary with the trained model's, and load its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_base
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.peft.formats.adapter_config import CONFIG_FILE
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import BeforeQuantizing
from paddlenlp_ext.trainer.build_model import weight_dtype
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 64


@dataclass(frozen=True)
class TeacherFiles:
    """Files of a teacher.

    Attributes:
        source: the model, or the base model of the adapter.
        adapter: the adapter; None: the teacher is a model.
        before_quantizing: function that transforms each weight of the adapter's base before quantization, or None.
    """

    source: ModelSource
    adapter: AdapterFiles | None = None
    before_quantizing: BeforeQuantizing | None = None


def find_teacher(options: DistillationConfig) -> TeacherFiles:
    """Find the files of the teacher.

    Raises:
        ValueError: the teacher or the base of its adapter does not exist or has no config.json.
    """
    name, algo = options.teacher_model_name_or_path, options.teacher_weight_quantize_algo
    assert name is not None, "the run has no teacher"
    folder, quantization = Path(name).expanduser(), None if algo is None else QuantizationConfig(algo=algo)
    with _named_errors():
        if (folder / CONFIG_FILE).is_file():
            return _find_adapter(folder, quantization)
        source = ModelSource.resolve(name, quantization=quantization)
        read_model_config(source.path)  # an error of a later read would not name the key
        return TeacherFiles(source)


def _find_adapter(folder: Path, quantization: QuantizationConfig | None) -> TeacherFiles:
    """Return the files of an adapter and of the base that its config names."""
    if (folder / "config.json").is_file():
        raise ValueError(f"{folder} has a model and an adapter; move one of them to another folder")
    if quantization is not None:
        raise ValueError(
            f"{folder} is an adapter, whose base is loaded as in training; leave out teacher_weight_quantize_algo"
        )
    base = read_json_object(folder / CONFIG_FILE).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder} does not name its base model; set base_model_name_or_path in its {CONFIG_FILE}")
    resolve_base(base, folder, f"correct base_model_name_or_path in {folder / CONFIG_FILE}")
    source, adapter = ModelSource.resolve(base), read_adapter(folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    source = replace(
        source,
        config_overrides=adapter.base_overrides(source.config),
        requested_quantization=adapter.base_quantization(source.config),
        tokenizer_path=folder if has_tokenizer else source.tokenizer_path,
    )
    before_quantizing = adapter.for_base(source.decoder_config()).before_quantizing
    return TeacherFiles(source, adapter, before_quantizing)


def teacher_context(options: DistillationConfig) -> int:
    """Return the context of the teacher in positions, after RoPE scaling.

    Raises:
        ValueError: the teacher does not exist, or its architecture is unknown.
    """
    source = find_teacher(options).source
    with _named_errors():
        return source.decoder_config().max_context


def load_teacher(files: TeacherFiles, config: RunConfig) -> TrainableModel:
    """Load the frozen teacher in evaluation mode; an adapter is merged if its method and its base allow it.

    Raises:
        ValueError: the weights cannot be loaded.
    """
    with _named_errors():
        base = AutoModelForCausalLM.from_pretrained(
            files.source,
            dtype=teacher_dtype(config.precision),
            use_flash_attention=config.model.use_flash_attention,
            before_quantizing=files.before_quantizing,
        )
        model: TrainableModel = base
        if files.adapter is not None:
            adapted = PeftModel.from_files(base, files.adapter, is_trainable=False)
            can_merge = adapted.peft_config.mergeable and base.quantization is None
            model = adapted.merge_and_unload() if can_merge else adapted
    for parameter in model.parameters():
        parameter.stop_gradient = True
    name = files.source.name if files.adapter is None else files.adapter.folder
    logger.info("teacher: %s, loaded in %s", name, base.dtype_name)
    return model


def is_base_of(model: TrainableModel, config: RunConfig, base: ModelSource, teacher: TeacherFiles) -> bool:
    """Return whether the teacher is the trained model without its adapter, so that it needs no copy of the weights.

    False for a model with experts, whose load balancing would count the teacher's forward passes.

    Args:
        model: the trained model; only its structure is read.
        config: the run's configuration.
        base: files from which the weights of the trained model were loaded.
        teacher: files of the teacher.
    """
    if not isinstance(model, PeftModel) or teacher.adapter is not None or model.load_balance is not None:
        return False
    source, keeps_values = teacher.source, not model.adapter.replaced.names and config.model.continue_training
    is_corrected = source.quantization is not None and model.peft_config.corrects_quantization
    return (
        keeps_values
        and not is_corrected
        and (source.path, source.quantization, source.config) == (base.path, base.quantization, base.config)
        and teacher_dtype(config.precision) == weight_dtype(config)
    )


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
        f"teacher_model_name_or_path: {source.name} ({len(other):,} tokens) and the trained model ({len(own):,} "
        f"tokens) have different vocabularies: the first difference is token {id_}, {token!r}; choose a teacher with "
        "the same tokenizer"
    )


def teacher_fingerprint(teacher: TeacherFiles, precision: PrecisionConfig) -> str:
    """Return a hash of the teacher's files, quantization and dtypes.

    The hash covers the content of config.json, and the size and parts of each weight file, so that large files are not
    read completely.
    """
    digest, source = hashlib.blake2b(digest_size=16), teacher.source
    settings = [source.quantization and source.quantization.describe(), precision.compute_dtype]
    digest.update(json.dumps([source.config, *settings], sort_keys=True).encode())
    of_adapter = [] if teacher.adapter is None else sorted(teacher.adapter.folder.glob("adapter_*"))
    for file in (*_weight_files(source.path), *of_adapter):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Prefix errors about the teacher's files with its key, because the student has files of the same names."""
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

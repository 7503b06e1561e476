"""Program llm/run_quantization.py: quantize a trained model and write it for serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.output_folder import check_output
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import PackedLayout
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.config import RunConfig, load_run_config
from paddlenlp_ext.config.run_config import QUANTIZATION_SECTIONS
from paddlenlp_ext.config.sections.ptq import PTQConfig
from paddlenlp_ext.inference.device_and_dtype import choose_device_or_cpu
from paddlenlp_ext.models.post_training_quantization import quantize_after_training, save_packed, with_scale_dtype
from paddlenlp_ext.peft.merge.write_merged import write_companions
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from paddlenlp_ext.quantization.quantize_model import quantization_report
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.utils.distributed_env import require_single_process
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger()
_METHODS = {"do_ptq": "rtn", "do_gptq": "gptq", "do_awq": "awq"}
_FORMATS = ("float32", "bfloat16", "float16")


def run_quantization(argv: Sequence[str]) -> None:
    """Read the configuration from files and the command line, and quantize the model.

    Args:
        argv: the command line without the program's name.

    Raises:
        ValueError: invalid configuration, model or rows; output_dir is not empty, and overwrite_output_dir is false; or
            a launcher started several processes.
    """
    config = load_run_config(argv, {}, QUANTIZATION_SECTIONS, "run_quantization.py")
    for note in config.notes:
        logger.info("%s", note)
    require_single_process("quantization")
    choose_device_or_cpu(config.precision.device)
    output = Path(str(config.train.output_dir))
    print(f"{output}: {quantize(config, output)}")


def quantize(config: RunConfig, output: Path) -> str:
    """Quantize the model of a configuration and write it to `output`; return a one-line summary.

    Raises:
        ValueError: see `run_quantization`.
    """
    assert config.ptq is not None, "the configuration must have the section ptq"
    options, layout = options_of_section(config.ptq)
    training = replace(config.train, do_train=options.needs_rows, do_eval=False)
    data = load_data(replace(config, train=training, data=replace(config.data, lazy=False)))
    check_output(output, config.train.overwrite_output_dir, (data.source.path,))
    stored = data.source.open_weights().dtype("model.embed_tokens.weight")
    dtype = stored if stored in _FORMATS else "bfloat16"
    batches = _batches(data.train_rows, config) if options.needs_rows else []
    options = with_scale_dtype(options, layout, dtype)
    model = quantize_after_training(data.source, options, batches, logger.info)
    with atomic_folder(output) as draft:
        write_companions(draft, data.source.path, data.source.path, dtype)
        save_packed(model, draft, layout, dtype)
    return quantization_report(model)


def options_of_section(ptq: PTQConfig) -> tuple[PostTrainingOptions, PackedLayout]:
    """Return the quantization method with its options, and the format of the files."""
    bits = 8 if ptq.quant_type == "weight_only_int8" else 4
    group = ptq.group_size if ptq.weight_quant_method == "groupwise" else None
    options = PostTrainingOptions(
        method=_METHODS[ptq.methods[0]],
        integers=IntegerFormat(bits=bits, group_size=group, symmetric=ptq.sym),
        act_order=ptq.desc_act,
        damping=ptq.gptq_damping,
        clips=ptq.auto_clip,
        skipped=tuple(ptq.skip_list_names or ()),
    )
    return options, LAYOUTS[ptq.weight_layout](bits=bits, group_size=group, symmetric=ptq.sym)


def _batches(rows: Any, config: RunConfig) -> list[list[np.ndarray]]:
    assert config.ptq is not None and rows is not None
    size = config.train.per_device_train_batch_size
    count = min(len(rows), size * config.ptq.num_batches)
    tokens = [np.asarray(rows[index].tokens) for index in range(count)]
    return [tokens[first : first + size] for first in range(0, count, size)]

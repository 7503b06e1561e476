"""Fold an adapter into its base model's files, one tensor at a time, and check the result before it is named.

What is written is never taken on trust: the merged files are loaded again and their logits compared with those of base
and adapter. The folder gets its name only after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.checkpoint.resolve import resolve_model
from paddlenlp_ext.checkpoint.weights import open_weights
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.files import AdapterFiles, read_adapter
from paddlenlp_ext.peft.merge_files import tensors_by_module, write_companions, write_merged_weights
from paddlenlp_ext.utils.atomic import atomic_folder
from paddlenlp_ext.utils.log import get_logger

logger = get_logger("paddlenlp_ext.peft")

# Largest difference of a logit, relative to the largest logit (at least 1). Both sides compute in float32, so that in
# float32 only the order of additions differs; else each merged weight is rounded once, by 2^-11 or 2^-8 of itself.
TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_PROMPT_SHAPE = (4, 24)


@dataclass(frozen=True)
class MergeReport:
    """What a merge did: how far the merged logits are from base and adapter, and how far those are from the base."""

    output: Path
    num_merged: int
    difference: float
    allowed: float
    effect: float


def merge_adapter(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    load_model: Callable[[Path], nn.Layer],
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> MergeReport:
    """Write the base model with the adapter folded in, as a Hugging Face folder.

    Writing holds one tensor beside the adapter; the check before and after holds the model in float32.

    Args:
        adapter: an adapter folder.
        output: the folder to make.
        load_model: gives the float32 model of a folder or file.
        base: the base model, None for the one that the adapter names.
        dtype: format of the merged weights, None for each base tensor's own.
        overwrite: replace a model that stands at `output`.

    Raises:
        ValueError: no base, an adapter of another model, one that changes nothing or can't be merged, an output that
            stands already, or a result beyond the tolerance; nothing is left at `output` then.
    """
    stored = read_adapter(adapter)
    base_path = resolve_model(_base_name(base, stored))
    _check_output(Path(output), overwrite, (base_path, stored.folder))
    source = open_weights(base_path)
    modules = tensors_by_module(stored, source)
    model = load_model(base_path)
    input_ids = _prompts(read_model_config(base_path)["vocab_size"])
    plain = _logits(model, input_ids)
    wanted = _logits(PeftModel.from_pretrained(model, stored.folder), input_ids)
    del model
    effect = float(np.abs(wanted - plain).max())
    if effect == 0.0:
        raise ValueError(f"{stored.folder}: this adapter changes nothing: was it ever trained? Nothing is written.")
    with atomic_folder(output) as draft:
        formats = write_merged_weights(draft, source, stored, modules, dtype)
        write_companions(draft, base_path, stored.folder, dtype)
        difference = float(np.abs(_logits(load_model(draft), input_ids) - wanted).max())
        allowed = max(TOLERANCE[name] for name in formats) * max(1.0, float(np.abs(wanted).max()))
        if not difference <= allowed:
            raise ValueError(
                f"the merged model differs from base and adapter by {difference:.3g} in a logit; {allowed:.3g} is "
                f"allowed for weights in {', '.join(sorted(formats))}. Nothing is written; try --dtype float32."
            )
    if difference > effect / 2:
        logger.warning(
            "the adapter changes logits by %.3g, rounding to %s by %.3g: much of it is lost; --dtype float32 keeps it",
            effect,
            ", ".join(sorted(formats)),
            difference,
        )
    return MergeReport(Path(output), len(modules), difference, allowed, effect)


def choose_device(name: str) -> None:
    """Compute on `name` ("cpu", "gpu", "gpu:1", ...); "auto" is the GPU where there is one.

    Raises:
        ValueError: this Paddle has no such device.
    """
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    available = ["cpu", *(["gpu"] if has_gpu else []), *paddle.device.get_all_custom_device_type()]
    wanted = ("gpu" if has_gpu else "cpu") if name == "auto" else name
    if wanted.partition(":")[0] not in available:
        raise ValueError(f"device {name!r} is not here; this Paddle has: {', '.join(available)}.")
    paddle.set_device(wanted)


def _base_name(base: str | os.PathLike[str] | None, stored: AdapterFiles) -> str | os.PathLike[str]:
    name = base or stored.base_model
    if not name:
        raise ValueError(f"{stored.folder} does not name its base model: give --model_name_or_path.")
    return name


def _check_output(output: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Refuse to write over an input, or over anything that was not asked to be replaced."""
    resolved = output.resolve()
    for path in inputs:
        if resolved == path.resolve() or resolved in path.resolve().parents:
            raise ValueError(f"{output}: writing there would replace {path}, which is read; choose another folder.")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{output} exists already: choose another folder, or give --overwrite.")
    if not (output / "config.json").is_file():
        raise ValueError(
            f"{output} holds no model (no config.json), so that it is not replaced: choose another folder."
        )


def _prompts(vocab_size: int) -> paddle.Tensor:
    """Fixed token ids: anyone can repeat the comparison."""
    return paddle.to_tensor(np.random.default_rng(0).integers(0, vocab_size, _PROMPT_SHAPE))


@paddle.no_grad()
def _logits(model: nn.Layer, input_ids: paddle.Tensor) -> np.ndarray:
    model.eval()
    return model(input_ids).astype("float32").numpy()

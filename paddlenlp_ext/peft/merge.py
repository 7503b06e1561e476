"""Fold an adapter into its base model's files, one tensor at a time, and check the result before it is named.

Nothing is taken on trust. First the formula: base and adapter, and the model merged in memory, have the same logits.
Then the files: loaded again, they have the logits of the model merged in memory and rounded to their format. The
folder gets its name only after that. So the check is as strict for bfloat16 as for float32, and what rounding itself
costs is reported.

An adapter that was trained over a quantized base is merged into what it was trained against, the dequantized weights,
so that the merged model is the trained one; or, where asked, into the original weights: how far the result is from the
trained model is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.hub import resolve_base, resolve_model
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.checkpoint.weight_source import open_weights
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.files import AdapterFiles, read_adapter
from paddlenlp_ext.peft.fold import require_mergeable_method
from paddlenlp_ext.peft.merge_files import round_as_stored, tensors_by_module, write_companions, write_merged_weights
from paddlenlp_ext.peft.model_card import write_model_card
from paddlenlp_ext.quantization.hf_config import from_quantization_config
from paddlenlp_ext.quantization.model import plain_linears, quantized_linears
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.weight_source import QuantizedWeights
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

MergeBase = Literal["dequantized", "original"]
_LOST = {
    "dequantized": "the adapter changes logits by %.3g, and rounding the merged weights by %.3g: much of what was "
    "learned is lost; --dtype float32 keeps it",
    "original": "the adapter changes logits by %.3g, and merging into the original weights changes them by %.3g: "
    "this is hardly the model that was trained; leave --merge_base out to have that one",
}
# Of a logit, relative to the largest logit (at least 1): all is computed in float32 and only the order of sums differs.
TOLERANCE = 1e-4
_PROMPT_SHAPE = (4, 24)


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        num_merged: layers.
        merged_into: the weights that the adapter was added to, in words.
        effect: how far the adapter moves a logit at most.
        difference: how far the merged files are from the trained base and adapter at most, rounding included.
    """

    output: Path
    num_merged: int
    merged_into: str
    effect: float
    difference: float


def merge_adapter(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    load_model: Callable[..., nn.Layer],
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    merge_base: MergeBase = "dequantized",
) -> MergeReport:
    """Write the base model with the adapter folded in, as a Hugging Face folder.

    Writing holds one tensor beside the adapter; the checks hold one model in float32.

    Args:
        adapter: an adapter folder.
        output: the folder to make.
        load_model: gives the float32 model of a folder or file, as `AutoModelForCausalLM.from_pretrained`; it gets
            `quantization_config` and `before_quantizing` for an adapter over a quantized base.
        base: the base model, None for the one that the adapter names.
        dtype: format of the merged weights, None for each base tensor's own.
        overwrite: replace a model that stands at `output`.
        allow_pickle: as `read_adapter`'s.
        merge_base: of a base that was quantized in training, the weights that the adapter is added to.

    Raises:
        ValueError: no base, an adapter of another model, one that changes nothing or can't be merged, an output that
            stands already, the original weights of a base that is stored quantized, or logits that differ by more than
            the tolerance; nothing is left at `output` then.
    """
    stored = read_adapter(adapter, allow_pickle)
    require_mergeable_method(stored.config)
    base_name = _base_name(base, stored)
    base_path = resolve_model(base) if base else resolve_base(base_name, stored.folder, "--model_name_or_path BASE")
    output = Path(output).expanduser()
    _check_output(output, overwrite, (base_path, stored.folder))
    base_config = read_model_config(base_path)
    quantization = stored.base_quantization(base_config)
    merged_into = _merged_into(merge_base, base_path, stored, quantization)
    modules = tensors_by_module(stored, QuantizedWeights(open_weights(base_path)))
    input_ids = _prompts(base_config["vocab_size"])
    trained = together = _together(load_model, base_path, stored, quantization, input_ids)
    effect = _largest(trained.wanted - trained.plain)
    if effect == 0.0:
        raise ValueError(f"{stored.folder}: this adapter changes nothing: was it ever trained? Nothing is written.")
    if quantization is not None and merge_base == "original":
        together = _together(load_model, base_path, stored, None, input_ids)
    merged = together.take().merge_and_unload()
    _require_same(_logits(merged, input_ids), together.wanted, "the model merged in memory", "base and adapter")
    with atomic_folder(output) as draft:
        write_merged_weights(draft, together.source, stored, modules, dtype)
        write_companions(draft, base_path, stored.folder, dtype)
        round_as_stored(merged, open_weights(draft))
        expected = _logits(merged, input_ids)
        del merged  # so that one model at a time is in memory
        written = _logits(load_model(draft), input_ids)
        _require_same(written, expected, "the merged files", "the model merged in memory")
        difference = _largest(written - trained.wanted)
        write_model_card(draft, stored, base_name, merged_into, effect, difference)
    if difference > effect / 2:
        logger.warning(_LOST[merge_base if quantization is not None else "dequantized"], effect, difference)
    return MergeReport(output, len(modules), merged_into, effect, difference)


@dataclass
class _Together:
    """A base with the adapter over it, and its logits without and with it."""

    model: PeftModel | None
    source: QuantizedWeights
    plain: np.ndarray
    wanted: np.ndarray

    def take(self) -> PeftModel:
        """The model, once: it is not kept alive here."""
        model, self.model = self.model, None
        assert model is not None
        return model


def _together(
    load_model: Callable[..., nn.Layer],
    base: Path,
    stored: AdapterFiles,
    quantization: QuantizationConfig | None,
    input_ids: paddle.Tensor,
) -> _Together:
    before = stored.before_quantizing
    options = {} if quantization is None else {"quantization_config": quantization, "before_quantizing": before}
    model = load_model(base, **options)
    layers = [*plain_linears(model), *quantized_linears(model)]
    source = QuantizedWeights(open_weights(base), quantization, layers, before)
    plain = _logits(model, input_ids)
    adapted = PeftModel.from_files(model, stored)
    return _Together(adapted, source, plain, _logits(adapted, input_ids))


def _merged_into(
    merge_base: MergeBase, base: Path, stored: AdapterFiles, quantization: QuantizationConfig | None
) -> str:
    """The weights that the adapter is added to, in words.

    Raises:
        ValueError: the original ones, which the base does not hold.
    """
    saved = from_quantization_config(read_model_config(base).get("quantization_config"))
    trained_over = stored.quantization or saved
    if merge_base == "original" and saved is not None:
        raise ValueError(f"{base} is stored quantized: give the original model with --model_name_or_path.")
    if trained_over is None:
        return "the base's weights"
    words = trained_over.describe()
    if merge_base == "original":
        return f"the original weights; it was trained against their quantized copy ({words})"
    return f"the dequantized weights that it was trained against ({words})"


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


def _largest(difference: np.ndarray) -> float:
    return float(np.abs(difference).max())


def _require_same(logits: np.ndarray, wanted: np.ndarray, what: str, reference: str) -> None:
    difference, allowed = _largest(logits - wanted), TOLERANCE * max(1.0, _largest(wanted))
    if not difference <= allowed:  # so that NaN is refused too
        raise ValueError(
            f"{what} and {reference} differ by {difference:.3g} in a logit ({allowed:.3g} is allowed). "
            "Nothing is written."
        )

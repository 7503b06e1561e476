"""Fold an adapter into its base model's files, one tensor at a time, and check the result before it is named.

Nothing is taken on trust. First the formula: base and adapter, and the model merged in memory, have the same logits.
Then the files: loaded again, they have the logits of the model merged in memory and rounded to their format. The
folder gets its name only after that. So the check is as strict for bfloat16 as for float32, and what rounding itself
costs is reported.

An adapter that was trained over a quantized base is merged into what it was trained against, the dequantized weights,
so that the merged model is the trained one; or, where asked, into the original weights: how far the result is from the
trained model is measured.

The files of a merged model: weights one tensor at a time, and what lies beside them.

The README.md of a merged model: from what it was made, and what was measured.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.dtypes import FLOATING, cast
from paddlenlp_ext.checkpoint.hub import resolve_base, resolve_model
from paddlenlp_ext.checkpoint.model_config import (
    read_generation_config,
    read_model_config,
    write_generation_config,
    write_model_config,
)
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.layers import LinearAdapter
from paddlenlp_ext.peft.merge.in_memory import merged_bias, merged_weight, require_mergeable, require_mergeable_method
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.save_and_load import AdapterFiles, read_adapter
from paddlenlp_ext.quantization.hf_config import from_quantization_config
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.quantization.model import quantizable_linears, quantized_linears
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.weight_source import QuantizedWeights
from paddlenlp_ext.utils.files import atomic_folder, write_text
from paddlenlp_ext.utils.logging import get_logger

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model")
_CHAT_TEMPLATE_FILES = ("chat_template*", "additional_chat_templates")


def tensors_by_module(stored: AdapterFiles, source: WeightSource) -> dict[str, dict[str, np.ndarray]]:
    """Layer name -> the adapter's tensors there by their own names.

    Raises:
        ValueError: the base has no such layers; all are named.
    """
    names = set(source.names())
    modules: dict[str, dict[str, np.ndarray]] = {}
    strangers = []
    for key, value in stored.tensors.items():
        if key in stored.config.own_keys:
            continue
        parts = key.split(".")
        ends = [end for end in range(len(parts) - 1, 0, -1) if ".".join([*parts[:end], "weight"]) in names]
        if ends:
            modules.setdefault(".".join(parts[: ends[0]]), {})[".".join(parts[ends[0] :])] = value
        else:
            strangers.append(key)
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise ValueError(
            f"{stored.folder}: the base {source.path} has no layer for {', '.join(strangers[:4])}{more}; "
            "the adapter belongs to another model"
        )
    return modules


def write_merged_weights(
    folder: Path,
    source: QuantizedWeights,
    stored: AdapterFiles,
    modules: dict[str, dict[str, np.ndarray]],
    dtype: str | None,
) -> None:
    """Copy every base tensor, in plain numbers, merged where the adapter has a part in it."""
    adapter_over = _adapter_layers(source, stored, modules)
    tensors: dict[str, LazyTensor] = {}
    for name in source.names():
        written = dtype if dtype and source.dtype(name) in FLOATING else source.dtype(name)
        module, _, leaf = name.rpartition(".")
        if module in modules and (leaf == "weight" or stored.config.changes_bias):
            read = partial(_merge, module, leaf, written, source, adapter_over)
        else:
            read = partial(source.read, name, written)
        tensors[name] = LazyTensor(source.shape(name), written, read)
    save_sharded(folder, tensors)


def round_as_stored(model: nn.Layer, source: WeightSource) -> None:
    """Give each float32 parameter of the model the precision in which its tensor is stored."""
    stored = set(source.names())
    for name, parameter in model.named_parameters():
        dtype = source.dtype(name) if name in stored else "float32"
        if dtype != "float32":
            parameter.set_value(cast(cast(parameter.numpy(), "float32", dtype), dtype, "float32"))


def _adapter_layers(
    source: WeightSource, stored: AdapterFiles, modules: dict[str, dict[str, np.ndarray]]
) -> Callable[[str, nn.Layer], LinearAdapter]:
    """Return a function that wraps a linear in the stored adapter of the layer of that name."""
    shapes = {module: source.shape(f"{module}.weight") for module in modules}
    bases = {module: SimpleNamespace(out_features=shape[0], in_features=shape[1]) for module, shape in shapes.items()}
    wrap = stored.config.wrapper(bases, seed=0)

    def over(module: str, linear: nn.Layer) -> LinearAdapter:
        layer, own = wrap(module, linear), modules[module]
        require_mergeable(stored.config, module, layer)
        assert isinstance(layer, LinearAdapter)
        state = layer.own_state()
        assert state.keys() == own.keys(), f"{module}: {sorted(state)} against {sorted(own)}"
        for key, tensor in state.items():
            tensor.set_value(own[key])
        for key, tensor in layer.shared_state().items():
            tensor.set_value(stored.tensors[key])
        return layer

    return over


def _merge(
    module: str, leaf: str, dtype: str, source: QuantizedWeights, adapter_over: Callable[[str, nn.Layer], LinearAdapter]
) -> np.ndarray:
    """One merged weight or bias (`leaf`), by the method's own formula over a linear that holds the base's."""
    packed = source.packed(module) if leaf == "weight" else None
    if packed is None:
        out_features, in_features = source.shape(f"{module}.weight")
        linear = Linear(in_features, out_features, bias=leaf == "bias")
        getattr(linear, leaf).set_value(source.read(f"{module}.{leaf}", "float32"))
    else:
        linear = QuantizedLinear(packed)
    layer = adapter_over(module, linear)
    merged = merged_bias(layer) if leaf == "bias" else merged_weight(layer)
    return source.read(f"{module}.{leaf}", dtype) if merged is None else cast(merged.numpy(), "float32", dtype)


def write_companions(folder: Path, base: Path, adapter: Path, dtype: str | None) -> None:
    """Config, generation config, tokenizer and chat template; the adapter's own tokenizer where it carries one.

    The run's configuration goes along: prompts are written by the chat template that it names.
    """
    config = read_model_config(base)
    config.pop("quantization_config", None)  # what is merged is in plain numbers
    write_model_config(folder, config, dtype)
    if base.is_file():
        write_generation_config(folder, read_generation_config(base))
    elif (base / "generation_config.json").is_file():
        shutil.copy(base / "generation_config.json", folder)
    if (adapter / "run_config.json").is_file():
        shutil.copy(adapter / "run_config.json", folder)
    if (adapter / "tokenizer_config.json").is_file():
        copy_tokenizer(adapter, folder)
    elif base.is_file():
        load_tokenizer(base).save_pretrained(folder)
    else:
        copy_tokenizer(base, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a model folder's tokenizer and chat template into another."""
    for pattern in (*_TOKENIZER_FILES, *_CHAT_TEMPLATE_FILES):
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, folder)


def write_model_card(
    folder: Path, stored: AdapterFiles, base: str | os.PathLike[str], merged_into: str, effect: float, difference: float
) -> None:
    """Write README.md.

    Args:
        folder: of the merged model.
        stored: the adapter.
        base: the base model, as the user called it.
        merged_into: the weights that the adapter was added to, in words.
        effect: how far the adapter moves a logit at most.
        difference: how far the merged model is from the trained one at most, in a logit.
    """
    text = f"""---
base_model: {os.fspath(base)}
tags:
- merged
---
# {os.fspath(base)} with an adapter merged into it

- adapter: {stored.folder.name}, of type {stored.config.peft_type}
- merged into: {merged_into}
- measured on fixed prompts: the adapter moves a logit by up to {effect:.3g}; this model differs from the one that was
  trained by up to {difference:.3g}
"""
    write_text(folder / "README.md", text)


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
    """Result of a merge.

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
    load_model: Callable[..., TrainableModel],
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
        ValueError: no base, an adapter of another model, one that changes nothing or cannot be merged, an output that
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
        raise ValueError(f"{stored.folder}: this adapter changes nothing: was it ever trained? Nothing is written")
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
    load_model: Callable[..., TrainableModel],
    base: Path,
    stored: AdapterFiles,
    quantization: QuantizationConfig | None,
    input_ids: paddle.Tensor,
) -> _Together:
    before = stored.before_quantizing
    options = {} if quantization is None else {"quantization_config": quantization, "before_quantizing": before}
    model = load_model(base, **options)
    layers = [*quantizable_linears(model), *quantized_linears(model)]
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
        raise ValueError(f"{base} is stored quantized: give the original model with --model_name_or_path")
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
    available = ["cpu", *(["gpu"] if has_gpu else []), *(paddle.device.get_all_custom_device_type() or [])]
    wanted = ("gpu" if has_gpu else "cpu") if name == "auto" else name
    if wanted.partition(":")[0] not in available:
        raise ValueError(f"device {name!r} is not here; this Paddle has: {', '.join(available)}")
    paddle.set_device(wanted)


def _base_name(base: str | os.PathLike[str] | None, stored: AdapterFiles) -> str | os.PathLike[str]:
    name = base or stored.base_model
    if not name:
        raise ValueError(f"{stored.folder} does not name its base model: give --model_name_or_path")
    return name


def _check_output(output: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Refuse to write over an input, or over anything that was not asked to be replaced."""
    resolved = output.resolve()
    for path in inputs:
        if resolved == path.resolve() or resolved in path.resolve().parents:
            raise ValueError(f"{output}: writing there would replace {path}, which is read; choose another folder")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{output} exists already: choose another folder, or give --overwrite")
    if not (output / "config.json").is_file():
        raise ValueError(f"{output} holds no model (no config.json), so that it is not replaced: choose another folder")


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

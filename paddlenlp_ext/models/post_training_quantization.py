"""Post-training quantization (PTQ) of a model, one decoder layer at a time, and export to packed checkpoint formats.

In addition to embedding and lm_head, at most one decoder layer is in memory in full precision. The outputs of a
quantized layer for the calibration batches are the calibration inputs of the next layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.config_json import write_model_config
from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.load_weights import check_tensors, read_into_parameters
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import PackedLayout
from paddlenlp_ext.checkpoint.quantized_formats.repack import pack_tensors
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy, save_sharded
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.models.auto import build_skeleton
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.smoothing_mappings import smoothing_mappings
from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.layer_tensors import LayerExchange, run_layer
from paddlenlp_ext.paddle_compat import has_storage
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.ptq.quantize_decoder_layer import quantize_decoder_layer
from paddlenlp_ext.quantization.ptq.quantize_matrix import ErrorTotals, PostTrainingOptions, prefix_errors
from paddlenlp_ext.quantization.quantize_model import quantizable_layers
from paddlenlp_ext.utils.layer_name_patterns import matching

_ALWAYS_SKIPPED = ".shared_expert_gate"
"""Name suffix of a linear layer with one output feature, which is never quantized."""


@paddle.no_grad()
def quantize_after_training(
    source: ModelSource,
    options: PostTrainingOptions,
    batches: Sequence[Sequence[np.ndarray]],
    report: Callable[[str], None] = lambda line: None,
) -> CausalLM:
    """Load a model, and quantize the linear layers of the decoder by rounding, GPTQ or AWQ.

    Args:
        source: model in full precision.
        options: method and format.
        batches: token ids of the calibration rows, by batch.
        report: function that receives a progress line per decoder layer.

    Raises:
        ValueError: see `quantize_matrix`; or the model is already quantized, a pattern of `skipped` matches no layer,
            or the group size does not divide the input features of a layer.
    """
    if source.stored_quantization is not None:
        raise ValueError(
            f"{source.name} is already quantized ({source.stored_quantization.describe()}); start from the original "
            "model"
        )
    model, weights = build_skeleton(source), source.open_weights()
    check_tensors({name: tuple(p.shape) for name, p in model.named_parameters()}, weights)
    layers = {name: each for name, each in quantizable_layers(model).items() if not name.endswith(_ALWAYS_SKIPPED)}
    skipped = {name for pattern in options.skipped for name in matching(pattern, layers, "skip_list_names")}
    names = [name for name in layers if name not in skipped]
    for name in names:
        with prefix_errors(name):
            options.integers.group_of(layers[name].weight.shape[-1])
    decoder, errors = model.model, ErrorTotals()
    load = partial(_load, dict(model.named_parameters()), weights)
    load(lambda name: not name.startswith("model.layers."))
    states = [_first_states(model, rows) for rows in batches]
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        load(lambda name, prefix=prefix: name.startswith(prefix))
        chosen = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        run = partial(_run, layer, index, states)
        quantize_decoder_layer(layer, chosen, smoothing_mappings(layer), run, options, errors)
        states = _run(layer, index, states)
        report(f"quantized layer {index + 1} of {len(decoder.layers)}")
    if errors.errors:
        report(errors.describe())
    model.quantization = QuantizationConfig(algo=options.integers.algo, group_size=options.integers.group_size)
    return model


_State = tuple[paddle.Tensor, AttentionInputs, LayerExchange | None]
"""Hidden states of a batch before a layer, inputs that all layers share, and tensors from earlier layers."""


def _run(layer: nn.Layer, index: int, states: Sequence[_State]) -> list[_State]:
    """Run layer `index` on the hidden states of all batches; hooks on its linear layers collect statistics."""
    return [(run_layer(exchange, layer, index, x, inputs), inputs, exchange) for x, inputs, exchange in states]


def _load(parameters: dict[str, paddle.Tensor], weights: WeightSource, is_chosen: Callable[[str], bool]) -> None:
    """Load the parameters whose names `is_chosen` accepts, and remove the loaded parameters from `parameters`."""
    chosen = {name: parameters.pop(name) for name in list(parameters) if is_chosen(name)}
    for parameter in chosen.values():
        if not has_storage(parameter):
            parameter.initialize()
    read_into_parameters(chosen, weights)


def _first_states(model: CausalLM, rows: Sequence[np.ndarray]) -> _State:
    """Return the input of the first layer for rows packed into one sequence."""
    decoder, ids = model.model, paddle.to_tensor(np.concatenate(rows)[None].astype(np.int64))
    inputs = decoder.attention_inputs(ids, None, [[len(row) for row in rows]], None)
    if decoder.load_balance is not None:
        decoder.load_balance.begin()
    x_BSD = decoder.embed(ids) * decoder.embedding_multiplier
    return x_BSD, inputs, decoder.layer_exchange(x_BSD, inputs)


def save_packed(model: CausalLM, folder: str | os.PathLike[str], layout: PackedLayout, dtype: str) -> None:
    """Write config.json and packed weights of a model from `quantize_after_training`.

    Args:
        model: the quantized model.
        folder: an existing folder.
        layout: storage layout of the quantized layers.
        dtype: dtype of the unquantized tensors.

    Raises:
        ValueError: the layout cannot store a matrix of this shape.
    """
    written = model.config.to_files(model.tensors_to_save())
    is_quantized = {name.removesuffix("_scale") for name in written if name.endswith(".weight_scale")}
    plain = {name: as_lazy(tensor) for name, tensor in written.items()}
    matrices = [name for name, each in plain.items() if name.endswith(".weight") and len(each.shape) == 2]
    tops = ("model.embed_tokens.weight", "lm_head.weight")
    skipped = [name.removesuffix(".weight") for name in matrices if name not in is_quantized and name not in tops]
    for name, each in plain.items():
        if each.dtype in ("float32", "bfloat16", "float16") and not name.endswith(".weight_scale"):
            written[name] = _in_dtype(each, dtype)
    config = {key: value for key, value in model.config.source.items() if key != "quantization_config"}
    write_model_config(folder, {**config, "quantization_config": layout.options(skipped)}, dtype)
    save_sharded(folder, pack_tensors(written, layout, scale_dtype(layout, dtype)))


def scale_dtype(layout: PackedLayout, dtype: str) -> str:
    """Return the dtype of the scales in a layout: float16 for GPTQ and AWQ, else the model's `dtype`."""
    return dtype if layout.method == "compressed-tensors" else "float16"


def with_scale_dtype(options: PostTrainingOptions, layout: PackedLayout, dtype: str) -> PostTrainingOptions:
    """Return the options with `scale_dtype` set to the dtype in which the layout stores scales."""
    return replace(options, integers=replace(options.integers, scale_dtype=scale_dtype(layout, dtype)))


def _in_dtype(tensor: LazyTensor, dtype: str) -> LazyTensor:
    return LazyTensor(tensor.shape, dtype, lambda: cast(tensor.read(), tensor.dtype, dtype))

"""Tensor parallelism: each rank holds shards of the layers of a model (arXiv:1909.08053).

    style           sharded axis          before the layer    after the layer
    colwise         outputs               copy_to_group       -
    inner_colwise   outputs               -                   -
    rowwise         inputs                -                   all-reduce; only rank 0 holds the bias
    vocab           vocabulary            see vocab_parallel.py
    norm            features              -                   -; an all-reduce in the norm adds the sums of squares,
                                                              except for norms of groups that are not divided
    replicated      none                  copy_to_group       -
    experts         experts               copy_to_group       all-reduce

`copy_to_group` is the identity in the forward pass, and an all-reduce of the gradient in the backward pass.
`inner_colwise` layers read the output of replicated linear layers (the latents of MLA), so they need no collective.
On each rank, only the local heads or experts read the output of a `replicated` layer. The gradients of the layer's
parameters are therefore summed over the ranks. A replicated norm has no collective before it.

Forward hooks call the collectives. The hooks are installed on the outermost layer (the adapter, if the layer has an
adapter), so that a base layer and its adapters share one all-reduce. Parameter names and model code do not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.layer_shape import exchanged_tensors
from paddlenlp_ext.nn.attention import AttentionLayer
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.experts import Experts
from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recurrent_mixer import RecurrentMixer
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.nn.short_convolution import ShortConvolution
from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import own_parameters
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards, apply_sequence_parallel
from paddlenlp_ext.parallel.shard_parameters import (
    AXES,
    keep_on_first_rank,
    local_shard,
    own_tensors,
    shard_parameter,
    shard_sizes,
)
from paddlenlp_ext.parallel.vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantizable_layers
from paddlenlp_ext.quantization.quantize_weight import block_size_of
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.quantization.shard_weight import sharded_block_size
from paddlenlp_ext.sharding_spec import Shard, Style, TensorPlan, set_placement, shard_of


@dataclass(frozen=True)
class _TPCollectives:
    """Collectives before column-parallel layers (`enter`) and after row-parallel layers (`leave`)."""

    enter: Callable[[paddle.Tensor], paddle.Tensor]
    leave: Callable[[paddle.Tensor], paddle.Tensor]


_NO_COLLECTIVES = _TPCollectives(lambda x: x, lambda y: y)
"""No collectives, for linear layers inside an expert layer: hooks on the expert layer call the collectives."""


def apply_tensor_plan(model: TrainableModel, axis: ProcessAxis, sequence: SequenceShards | None = None) -> None:
    """Shard a model and its adapters in place.

    Args:
        model: `CausalLM` or `PeftModel`, equal on all ranks.
        axis: mesh axis of the tensor-parallel ranks.
        sequence: sequence parallelism between the sharded layers, or None.

    Raises:
        ValueError: the number of ranks does not divide a size of the model, or an adapter cannot be sharded.
    """
    collectives = _TPCollectives(axis.copy, axis.all_reduce)
    if sequence is not None:
        collectives = _TPCollectives(sequence.gather, sequence.reduce_scatter)
    decoder = model.get_base_model()
    assert isinstance(decoder, CausalLM)
    check_sizes(decoder.config, axis.size)
    styles = styles_by_name(decoder, decoder.config.tensor_plan)
    inputs: dict[str, _SharedInput] = {}
    for name, outermost in list(_outermost_layers(decoder)):
        style = styles.get(_without_adapters(name))
        if style is None:
            if isinstance(outermost, AdapterLayer):  # an adapter around attention, the MLP or a decoder layer
                _shard_adapter(outermost, "colwise", axis, outermost.shards_heads)
        elif style == "vocab":
            _shard_vocabulary(decoder, name, outermost, axis)
        elif style == "norm":
            _shard_norm(name, outermost, axis)
        elif style == "experts":
            _shard_experts(decoder, name, axis, collectives)
        else:
            parent = name.rpartition(".")[0]
            around = _NO_COLLECTIVES if _is_in_expert_layer(parent, styles) else collectives
            shared = inputs.setdefault(parent, _SharedInput(around.enter))
            if style == "replicated":
                _replicate(outermost, axis, shared)
            elif not _shard_linear(outermost, style, axis, shared, around.leave):
                decoder.remote_parameters.add(f"{_without_adapters(name)}.bias")
    for layer in decoder.sublayers():
        if isinstance(layer, AttentionLayer):
            layer.keep_heads(axis.index, axis.size)
            if layer.sinks is not None:
                shard_parameter(layer, "sinks", 0, axis)
        elif isinstance(layer, ShortConvolution):
            for name in own_tensors(layer.conv):
                shard_parameter(layer.conv, name, 0, axis)
        elif isinstance(layer, RecurrentMixer):
            layer.keep_heads(axis.index, axis.size)
            for owner, name, heads in layer.head_tensors():
                shard_parameter(owner, name, heads, axis)
    _shard_lm_head(decoder, axis)
    if sequence is not None:
        apply_sequence_parallel(decoder, sequence)


def check_tensor_plan(model: CausalLM, degree: int, quantization: QuantizationConfig | None) -> None:
    """Check that a model can be sharded over `degree` ranks.

    Args:
        model: `CausalLM` before quantization, with or without weights.
        degree: number of tensor-parallel ranks.
        quantization: requested or stored quantization of the base model, or None.

    Raises:
        ValueError: `check_sizes` fails, or a shard would split a block of quantized weights.
    """
    check_sizes(model.config, degree)
    if quantization is None or degree == 1:
        return
    styles = styles_by_name(model, model.config.tensor_plan)
    layers = quantizable_layers(model)
    for name, chosen in quantization.for_layers(layers).items():
        linear = layers[name]
        if isinstance(linear, GroupedLinear) or styles[name] == "replicated":
            continue  # no split: each rank holds the full tensors, or all values of some experts
        shard_axis = AXES[styles[name]]
        assert isinstance(chosen.algo, str), "the config names an algorithm per layer; call for_layers first"
        shape = (linear.out_features, linear.in_features)
        size = shape[shard_axis]
        try:
            sharded_block_size(
                chosen.algo, shape, block_size_of(chosen, shape[1]), Shard(shard_axis, 0, size // degree, size)
            )
        except ValueError as error:
            raise ValueError(
                f"tensor_parallel_degree {degree}: {name}: {error}; choose a smaller degree or a smaller "
                "qlora_weight_blocksize, or use unquantized weights"
            ) from error


def check_sizes(config: Any, degree: int) -> None:
    """Check that the degree divides the counts of heads and experts, and the size of the MLP.

    Raises:
        ValueError: the degree does not divide one of these sizes, and the message suggests a smaller degree; or layers
            of the model cannot be sharded.
    """
    exchanged = exchanged_tensors(config)
    if degree > 1 and exchanged is not None:
        raise ValueError(
            f"tensor_parallel_degree {degree} is not supported for models with {exchanged}; set "
            "tensor_parallel_degree to 1"
        )
    if degree > 1 and any(shape is not None and shape.shared_name is None for shape in config.experts or ()):
        raise ValueError(
            f"tensor_parallel_degree {degree} is not supported for models with experts beside the feed-forward block; "
            "set tensor_parallel_degree to 1"
        )
    sizes = [("num_attention_heads", config.num_attention_heads)]
    for shape in {*config.layer_shapes}:
        sizes.append(("num_key_value_heads", shape.num_kv_heads))
        if config.experts is None or None in config.experts:
            sizes.append(("intermediate_size", shape.intermediate_size))
    for experts in {shape for shape in config.experts or () if shape is not None}:
        sizes += [("number of experts", experts.num_experts), ("size of the shared expert", experts.shared_size)]
    for mixer in config.other_mixers:
        sizes += mixer.sharded_sizes.items()
    uneven = sorted({f"{name} {size}" for name, size in sizes if size % degree})
    if uneven:
        works = max(d for d in range(1, degree + 1) if all(size % d == 0 for _, size in sizes))
        raise ValueError(
            f"tensor_parallel_degree {degree} does not divide {', '.join(uneven)} of the model; the next smaller "
            f"valid degree is {works}"
        )


def styles_by_name(model: CausalLM, plan: TensorPlan) -> dict[str, Style]:
    """Return the style of each layer that matches a pattern of the plan, by layer name.

    Raises:
        ValueError: a pattern matches no layer, or a linear layer matches none of the patterns.
    """
    names = {_without_adapters(name): layer for name, layer in model.named_sublayers()}
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        found = [name for name in names if re.fullmatch(expression, name)]
        if not found and not (pattern == "lm_head" and model.lm_head is None):
            raise ValueError(f"the tensor-parallel plan contains {pattern}, which matches no layer of this model")
        styles |= dict.fromkeys(found, style)
    unnamed = [name for name, layer in names.items() if isinstance(layer, Linear) and name not in styles]
    if unnamed:
        raise ValueError(f"the tensor-parallel plan has no entry for {', '.join(unnamed[:8])}")
    return styles


class _SharedInput:
    """Input that several column-parallel layers (q, k and v) read.

    `copy_to_group` or an all-gather is applied once to the input, so that the layers share one collective.
    """

    def __init__(self, enter: Callable[[paddle.Tensor], paddle.Tensor]) -> None:
        self._enter = enter
        self.readers = 0
        self._source: paddle.Tensor | None = None
        self._copied: paddle.Tensor | None = None
        self._left = 0

    def attach(self, layer: nn.Layer) -> None:
        """Register a layer that reads this input."""
        self.readers += 1
        layer.register_forward_pre_hook(self._replace_input)

    def _replace_input(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the first input of a layer with the result of `enter`, which all readers of this input share."""
        if inputs[0] is not self._source:
            self._source, self._copied, self._left = inputs[0], self._enter(inputs[0]), self.readers
        result = self._copied
        self._left -= 1
        if self._left == 0:  # every reader has received the result
            self._source = self._copied = None
        return (result, *inputs[1:])


def _outermost_layers(model: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    """Yield (name, layer) for every layer that is not wrapped by an adapter."""
    return ((name, layer) for name, layer in model.named_sublayers() if name.rpartition(".")[2] != "base")


def _without_adapters(name: str) -> str:
    """Return the name of a layer without the components "base", which the adapters add."""
    return ".".join(part for part in name.split(".") if part != "base")


def _unwrap(layer: nn.Layer) -> tuple[list[AdapterLayer], nn.Layer]:
    """Return the adapters of a layer, outermost first, and the base layer."""
    adapters = []
    while isinstance(layer, AdapterLayer):
        adapters.append(layer)
        layer = layer.base
    return adapters, layer


def _shard_linear(
    outermost: nn.Layer,
    style: Style,
    axis: ProcessAxis,
    shared: _SharedInput,
    leave: Callable[[paddle.Tensor], paddle.Tensor],
) -> bool:
    """Shard a linear layer and its adapters.

    Returns:
        False if this rank dropped the bias, because only rank 0 holds the bias of a row-parallel layer.
    """
    adapters, base = _unwrap(outermost)
    assert isinstance(base, Linear | QuantizedLinear)
    has_bias = base.bias is not None
    _shard_weight(base, style, axis)
    if style != "rowwise":
        if base.bias is not None:
            shard_parameter(base, "bias", 0, axis)
        if style == "colwise":
            shared.attach(outermost)
    else:
        if base.bias is not None:
            keep_on_first_rank(base, "bias", axis)
        outermost.register_forward_post_hook(lambda layer, inputs, output: leave(output))
    for adapter in reversed(adapters):
        _shard_adapter(adapter, "rowwise" if style == "rowwise" else "colwise", axis, has_partial_gradients=True)
    return not has_bias or base.bias is not None


def _shard_weight(base: Linear | QuantizedLinear, style: Style, axis: ProcessAxis) -> None:
    shard_axis = AXES[style]
    if isinstance(base, QuantizedLinear):
        base.shard_weight(local_shard((base.out_features, base.in_features)[shard_axis], shard_axis, axis))
    else:
        shard_parameter(base, "weight", shard_axis, axis)
        base.out_features, base.in_features = base.weight.shape


def _shard_adapter(adapter: AdapterLayer, style: Style, axis: ProcessAxis, has_partial_gradients: bool) -> None:
    """Shard the tensors of an adapter.

    Args:
        adapter: the adapter.
        style: style of the adapted layer.
        axis: mesh axis of the tensor-parallel ranks.
        has_partial_gradients: whether the gradients of unsharded parameters are partial sums on each rank.
    """
    for name, shard_axis in adapter.sharding_axes(style).items():
        parent, _, leaf = name.rpartition(".")
        owner = layer_at(adapter, parent)
        if shard_axis is not None:
            shard_parameter(owner, leaf, shard_axis, axis, even=style != "vocab")
        elif has_partial_gradients and leaf in own_parameters(owner):
            set_placement(own_parameters(owner)[leaf], needs_tp_reduce=True)
    adapter.set_tensor_parallel_shard(style, axis)


def _replicate(outermost: nn.Layer, axis: ProcessAxis, shared: _SharedInput) -> None:
    """Mark the gradients of a replicated layer as partial sums, and install copy_to_group before a linear layer.

    A norm does not need copy_to_group, because it reads the output of local heads or of a replicated linear layer.
    """
    for parameter in outermost.parameters():
        set_placement(parameter, needs_tp_reduce=True)
    adapters, base = _unwrap(outermost)
    if isinstance(base, Linear | QuantizedLinear):
        shared.attach(outermost)
        for adapter in reversed(adapters):
            _shard_adapter(adapter, "replicated", axis, has_partial_gradients=True)


def _shard_norm(name: str, outermost: nn.Layer, axis: ProcessAxis) -> None:
    """Shard a norm over the outputs of a column-parallel layer.

    Raises:
        ValueError: the norm has an adapter.
    """
    if not isinstance(outermost, RMSNorm):
        raise ValueError(f"{name}: tensor parallelism does not support an adapter on this norm; remove the adapter")
    shard_parameter(outermost, "weight", 0, axis)
    outermost.shards = axis


def _shard_experts(model: CausalLM, name: str, axis: ProcessAxis, collectives: _TPCollectives) -> None:
    """Shard the experts of a layer; one all-reduce after the layer sums the outputs of routed and shared experts."""
    experts, mixture = layer_at(model, name), layer_at(model, name.rpartition(".")[0])
    assert isinstance(experts, Experts)
    for outermost in (experts.input_layer, experts.down_proj):
        adapters, base = _unwrap(outermost)
        for tensor in own_tensors(base):
            shard = shard_parameter(base, tensor, 0, axis)
            experts.first, experts.num_local = shard.start, shard.stop - shard.start
        for adapter in adapters:
            _shard_adapter(adapter, "experts", axis, has_partial_gradients=False)
    for bias in list(own_parameters(experts)):
        shard_parameter(experts, bias, 0, axis)
    balance = model.load_balance
    assert balance is not None, "a model with experts must count tokens per expert"
    balance.share = 1.0 / axis.size
    mixture.register_forward_pre_hook(lambda layer, inputs: (collectives.enter(inputs[0]), *inputs[1:]))
    mixture.register_forward_post_hook(lambda layer, inputs, output: collectives.leave(output))


def _is_in_expert_layer(parent: str, styles: dict[str, Style]) -> bool:
    """Return whether a layer with the name `parent` is an expert layer or its shared expert."""
    name = _without_adapters(parent)
    return any(styles.get(f"{layer}.experts") == "experts" for layer in (name, name.rpartition(".")[0]))


def _shard_vocabulary(model: nn.Layer, name: str, outermost: nn.Layer, axis: ProcessAxis) -> None:
    """Shard the embedding or the lm_head, together with its adapters, along the vocabulary."""
    adapters, base = _unwrap(outermost)
    shard = shard_parameter(base, "weight", AXES["vocab"], axis, even=False)
    if isinstance(base, Embedding):
        replace_layer(model, name + ".base" * len(adapters), VocabParallelEmbedding(base.weight, shard, axis))
    for adapter in adapters:  # adapters read and return unsharded hidden states, so their gradients are complete
        _shard_adapter(adapter, "vocab", axis, has_partial_gradients=False)


def _shard_lm_head(model: CausalLM, axis: ProcessAxis) -> None:
    """Set `vocab_parallel`, which computes logits and loss with the sharded lm_head or tied embedding."""
    head: Any = _unwrap(model.model.embed_tokens if model.lm_head is None else model.lm_head)[1]
    shard = shard_of(head.weight)
    assert shard is not None, "the tensor plan must shard the embedding and the lm_head along the vocabulary"
    model.vocab_parallel = VocabParallelHead(shard, shard_sizes(shard.size, axis.size), axis)

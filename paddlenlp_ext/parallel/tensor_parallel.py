"""Tensor parallelism: each rank has a part of every layer. The only file that knows which axis a style cuts.

    colwise   a rank has some outputs; its input is the same on all ranks, so that the input's gradient is summed
    rowwise   a rank has some inputs and gives its part of a sum, which is made behind the layer; a bias is rank 0's
    vocab     a rank has some rows of the embedding and the head (vocabulary.py)
    replicated   whole, but each rank applies it to its own heads: its gradient is summed

Hooks on the outermost layer of a place do it, so that a base and its adapters share one reduction (Shoeybi et al. 2019,
arXiv 1909.08053, for the scheme). Names, and the model's own code, stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import layer_at, replace_layer
from paddlenlp_ext.paddle_compat import free_storage, has_storage, own_buffers, own_parameters
from paddlenlp_ext.parallel.collectives import gathered, spread, summed
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards, divide_sequence
from paddlenlp_ext.parallel.vocab_parallel import VocabularyEmbedding, VocabularyHead
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.quantization.model import quantizable_linears
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.quantize import block_size_of
from paddlenlp_ext.quantization.slicing import sharded_block_size
from paddlenlp_ext.sharding_spec import Shard, Style, TensorPlan, is_on_stage, set_placement, shard_of

AXES: dict[Style, int] = {"colwise": 0, "rowwise": 1, "vocab": 0}  # of a weight [out, in]


@dataclass(frozen=True)
class _TPCollectives:
    """What stands in front of layers that are cut by outputs, and behind those that are cut by inputs."""

    enter: Callable[[paddle.Tensor], paddle.Tensor]
    leave: Callable[[paddle.Tensor], paddle.Tensor]


def apply_tensor_plan(model: nn.Layer, axis: ProcessAxis, sequence: SequenceShards | None = None) -> None:
    """Cut a model, adapters and all, in place; every rank's model was the same before.

    Args:
        model: a `CausalLM` or `PeftModel`, of which this rank keeps its part.
        axis: the tensor ranks.
        sequence: how each rank has a part of the positions between the cut layers (sequence.py); None: it has all.

    Raises:
        ValueError: a size does not divide among the ranks, or an adapter can't be cut; the message says what can.
    """
    passage = _TPCollectives(lambda x: spread(x, axis.group), lambda y: summed(y, axis.group))
    if sequence is not None:
        passage = _TPCollectives(sequence.gather, sequence.scatter_sum)
    decoder = getattr(model, "base_model", model)
    check_sizes(decoder.config, axis.size)
    styles = styles_by_name(decoder, decoder.config.tensor_plan)
    inputs: dict[str, _SharedInput] = {}
    for name, outermost in list(_places(decoder)):
        style = styles.get(_plain(name))
        if style is None:
            if isinstance(outermost, AdapterLayer):  # around attention, a feed-forward half or a whole layer
                _cut_adapter(outermost, "colwise", axis, _sees_parts(outermost))
        elif style == "vocab":
            _cut_vocabulary(decoder, name, outermost, axis)
        elif style == "replicated":
            _mark_partial(outermost)
        else:
            parent = name.rpartition(".")[0]
            shared = inputs.setdefault(parent, _SharedInput(passage.enter))
            if not _cut_linear(outermost, style, axis, shared, passage.leave):
                decoder.remote_parameters.add(f"{_plain(name)}.bias")
    _cut_head(decoder, axis)
    if sequence is not None:
        divide_sequence(decoder, sequence)


def check_tensor_plan(model: nn.Layer, degree: int, quantization: QuantizationConfig | None) -> None:
    """Refuse a model that can't be cut among so many ranks, from its shapes alone.

    Args:
        model: a `CausalLM` in plain numbers, or without values.
        degree: how many ranks.
        quantization: how it will be quantized before it is cut, or is in its files.

    Raises:
        ValueError: as `check_sizes`, or blocks of quantized weights that the cuts would break up.
    """
    check_sizes(model.config, degree)
    if quantization is None or degree == 1:
        return
    styles = styles_by_name(model, model.config.tensor_plan)
    for name, chosen in quantization.for_layers(quantizable_linears(model)).items():
        linear, cut_axis = layer_at(model, name), AXES[styles[name]]
        shape = (linear.out_features, linear.in_features)
        size = shape[cut_axis]
        try:
            sharded_block_size(
                chosen.algo, shape, block_size_of(chosen, shape[1]), Shard(cut_axis, 0, size // degree, size)
            )
        except ValueError as error:
            raise ValueError(
                f"tensor_parallel_degree {degree}: {name}: {error}; choose a smaller qlora_weight_blocksize or degree, "
                "or leave weight_quantize_algo out"
            ) from error


def check_sizes(config: Any, degree: int) -> None:
    """Refuse a degree that heads or features do not divide by; needs no weights.

    Raises:
        ValueError: names the largest degree below it that works.
    """
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % degree]
    if uneven:
        works = max(d for d in range(1, degree + 1) if all(size % d == 0 for size in sizes.values()))
        raise ValueError(
            f"tensor_parallel_degree {degree} does not divide {', '.join(uneven)} of the model; the largest degree "
            f"below it that does is {works}"
        )


def styles_by_name(model: nn.Layer, plan: TensorPlan) -> dict[str, Style]:
    """The style of every layer that the plan names.

    Raises:
        ValueError: a name of the plan matches nothing, or a linear is not named.
    """
    names = {_plain(name): layer for name, layer in model.named_sublayers()}
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        found = [name for name in names if re.fullmatch(expression, name)]
        if not found and not (pattern == "lm_head" and model.lm_head is None):
            raise ValueError(f"the tensor plan names {pattern}, which matches no layer of this model")
        styles |= dict.fromkeys(found, style)
    unnamed = [name for name, layer in names.items() if isinstance(layer, Linear) and name not in styles]
    if unnamed:
        raise ValueError(f"the tensor plan names no style for {', '.join(unnamed[:8])}")
    return styles


class ShardGroup:
    """What a cut adapter may ask of the ranks that hold its other parts.

    Args:
        axis: the tensor ranks.
    """

    def __init__(self, axis: ProcessAxis) -> None:
        self.index, self.size, self._group = axis.index, axis.size, axis.group

    def all_reduce(self, x: paddle.Tensor) -> paddle.Tensor:
        """The sum of all ranks' `x`; gradients pass."""
        return summed(x, self._group)

    def all_gather(self, part: paddle.Tensor, axis: int) -> paddle.Tensor:
        """The whole of equal parts, without gradients."""
        return gathered(part, axis, [part.shape[axis]] * self.size, self._group)


class _SharedInput:
    """The input of neighbours that are cut by outputs (q, k and v): spread once, so that one sum serves them all."""

    def __init__(self, enter: Callable[[paddle.Tensor], paddle.Tensor]) -> None:
        self._enter = enter
        self.readers = 0
        self._source, self._spread, self._left = None, None, 0

    def hook(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a layer's forward: its first argument, spread."""
        if inputs[0] is not self._source:
            self._source, self._spread, self._left = inputs[0], self._enter(inputs[0]), self.readers
        result = self._spread
        self._left -= 1
        if self._left == 0:  # nobody else asks: do not keep it alive
            self._source = self._spread = None
        return (result, *inputs[1:])


def _places(model: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    """(name, outermost layer) of every place: what an adapter wraps is not a place of its own."""
    return ((name, layer) for name, layer in model.named_sublayers() if name.rpartition(".")[2] != "base")


def _plain(name: str) -> str:
    """A layer's name without the adapters around it and above it."""
    return ".".join(part for part in name.split(".") if part != "base")


def _chain(layer: nn.Layer) -> tuple[list[AdapterLayer], nn.Layer]:
    """The adapters of a place from the outside in, and the base."""
    adapters = []
    while isinstance(layer, AdapterLayer):
        adapters.append(layer)
        layer = layer.base
    return adapters, layer


def _cut_linear(
    outermost: nn.Layer,
    style: Style,
    axis: ProcessAxis,
    shared: _SharedInput,
    leave: Callable[[paddle.Tensor], paddle.Tensor],
) -> bool:
    """Cut a place; False where this rank goes without something: the bias of a sum is the first rank's alone."""
    adapters, base = _chain(outermost)
    has_bias = base.bias is not None
    _cut_weight(base, style, axis)
    if style == "colwise":
        if base.bias is not None:
            cut_parameter(base, "bias", 0, axis)
        shared.readers += 1
        outermost.register_forward_pre_hook(shared.hook)
    else:
        if base.bias is not None:
            _leave_to_first(base, "bias", axis)
        outermost.register_forward_post_hook(lambda layer, inputs, output: leave(output))
    for adapter in reversed(adapters):
        _cut_adapter(adapter, style, axis, sees_parts=True)
    return not has_bias or base.bias is not None


def _cut_weight(base: Linear | QuantizedLinear, style: Style, axis: ProcessAxis) -> None:
    cut_axis = AXES[style]
    if isinstance(base, QuantizedLinear):
        base.shard_weight(local_shard((base.out_features, base.in_features)[cut_axis], cut_axis, axis))
    else:
        cut_parameter(base, "weight", cut_axis, axis)
        base.out_features, base.in_features = base.weight.shape


def _cut_adapter(adapter: AdapterLayer, style: Style, axis: ProcessAxis, sees_parts: bool) -> None:
    """Cut an adapter's own tensors; what stays whole has only a part of its gradient where the adapter `sees_parts`."""
    for name, cut_axis in adapter.sharding_axes(style).items():
        owner, leaf = _owner(adapter, name)
        if cut_axis is not None:
            cut_parameter(owner, leaf, cut_axis, axis)
        elif sees_parts and leaf in own_parameters(owner):
            set_placement(own_parameters(owner)[leaf], needs_tp_reduce=True)
    adapter.set_tensor_parallel_shard(style, ShardGroup(axis))


def _sees_parts(adapter: AdapterLayer) -> bool:
    """Whether an adapter around more than a linear works on this rank's heads, and not on whole hidden states."""
    return adapter.shards_heads


def _owner(layer: nn.Layer, name: str) -> tuple[nn.Layer, str]:
    parent, _, leaf = name.rpartition(".")
    return layer_at(layer, parent), leaf


@paddle.no_grad()
def cut_parameter(layer: nn.Layer, name: str, cut_axis: int, axis: ProcessAxis, even: bool = True) -> Shard:
    """Keep this rank's part of a layer's parameter or buffer.

    Raises:
        ValueError: the ranks can't have equal parts (where `even` asks for them).
    """
    whole = own_parameters(layer).get(name)
    is_parameter = whole is not None
    whole = whole if is_parameter else own_buffers(layer)[name]
    size = whole.shape[cut_axis]
    if even and size % axis.size:
        raise ValueError(
            f"tensor_parallel_degree {axis.size} does not divide {name} {list(whole.shape)} of {type(layer).__name__} "
            f"along its axis {cut_axis}; choose a degree or an adapter size that divides {size}"
        )
    cut = local_shard(size, cut_axis, axis)
    if not has_storage(whole):  # built for its shape; the part's values are read later
        shape = [*whole.shape[:cut_axis], cut.stop - cut.start, *whole.shape[cut_axis + 1 :]]
        part = paddle.zeros(shape, whole.dtype)
    else:
        part = whole[cut.index].clone()
    if not is_parameter:
        part.stop_gradient = True
        own_buffers(layer)[name] = part
    else:
        new = layer.create_parameter(
            list(part.shape), dtype=whole.dtype, default_initializer=nn.initializer.Constant(0.0)
        )
        new.set_value(part)
        new.stop_gradient = whole.stop_gradient
        new.is_distributed = True
        own_parameters(layer)[name] = part = new
    set_placement(part, shard=cut, is_on_stage=is_on_stage(whole))
    if not is_on_stage(whole):
        free_storage(part)
    return cut


def local_shard(size: int, cut_axis: int, axis: ProcessAxis) -> Shard:
    """Which of `size` indices are this rank's."""
    sizes = sizes_of(size, axis.size)
    start = sum(sizes[: axis.index])
    return Shard(cut_axis, start, start + sizes[axis.index], size)


def sizes_of(size: int, parts: int) -> list[int]:
    """How many of `size` indices each of `parts` ranks has; the first ones may have one more."""
    return [size // parts + (index < size % parts) for index in range(parts)]


def _leave_to_first(layer: nn.Layer, name: str, axis: ProcessAxis) -> None:
    """A parameter that counts once in a sum of parts: the other ranks go without."""
    if axis.index == 0:
        getattr(layer, name).is_distributed = True  # its gradient is in the norm once, as those of parts are
    else:
        setattr(layer, name, None)


def _mark_partial(layer: nn.Layer) -> None:
    for parameter in layer.parameters():
        set_placement(parameter, needs_tp_reduce=True)


def _cut_vocabulary(model: nn.Layer, name: str, outermost: nn.Layer, axis: ProcessAxis) -> None:
    adapters, base = _chain(outermost)
    cut = cut_parameter(base, "weight", AXES["vocab"], axis, even=False)
    if isinstance(base, Linear):
        if adapters:
            raise ValueError(f"an adapter on {name} is not available with tensor parallelism; leave it out")
        return
    replace_layer(model, name + ".base" * len(adapters), VocabularyEmbedding(base.weight, cut, axis))


def _cut_head(model: nn.Layer, axis: ProcessAxis) -> None:
    cut = shard_of(model.head_weight())
    assert cut is not None, "the plan cuts embedding and head along the vocabulary"
    model.vocab_parallel = VocabularyHead(cut, sizes_of(cut.size, axis.size), axis)

"""Tensors that decoder layers exchange in addition to the hidden states: layer embeddings, shared keys and values.

A recomputed layer must receive and return every tensor with a gradient as an argument or a result. `call_with_tensors`
passes the tensors of a layer in this way.

Shapes: B batch, S sequence, L layers, P size of a layer embedding, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.nn.recompute import RecomputePlan

KeysAndValues = tuple[paddle.Tensor, paddle.Tensor]
"""Keys and values of an attention layer after norms and RoPE, each [B, S, K, H]."""


@dataclass
class LayerTensors:
    """Tensors that one layer reads and writes in a forward pass.

    Attributes:
        embedding: layer embedding of each token, [B, S, P]; None: the model has no layer embeddings.
        shared: keys and values of an earlier layer; None: the layer computes its keys and values.
        keeps_keys: whether a later layer reads the keys and values of this layer.
        kept: keys and values that the attention of this layer has computed; None if `keeps_keys` is False.
    """

    embedding: paddle.Tensor | None = None
    shared: KeysAndValues | None = None
    keeps_keys: bool = False
    kept: KeysAndValues | None = None

    def keep(self, keys: paddle.Tensor, values: paddle.Tensor) -> None:
        """Store the keys and values of this layer if a later layer reads them."""
        if self.keeps_keys:
            self.kept = keys, values

    @property
    def tensors(self) -> list[paddle.Tensor]:
        """Tensors that the layer reads."""
        return [*([] if self.embedding is None else [self.embedding]), *(self.shared or ())]

    def with_tensors(self, tensors: Sequence[paddle.Tensor]) -> LayerTensors:
        """Return a copy that reads other `tensors`, in the order of the property `tensors`."""
        *embedding, keys, values = tensors if self.shared is not None else (*tensors, None, None)
        shared = None if keys is None or values is None else (keys, values)
        return LayerTensors(embedding[0] if embedding else None, shared, self.keeps_keys)


def call_with_tensors(
    call: Callable[..., Any], function: Callable[..., paddle.Tensor], x_BSD: paddle.Tensor, inputs: Any
) -> paddle.Tensor:
    """Return `function(x_BSD, inputs)`, run by `call`, which may recompute it in the backward pass.

    Args:
        call: function that receives a function and its arguments, and returns the results.
        function: decoder layer or part of a layer.
        x_BSD: hidden states [B, S, D].
        inputs: `AttentionInputs`; the tensors of `inputs.layer` become arguments and results of the called function.
    """
    exchanged: LayerTensors | None = inputs.layer
    if exchanged is None:
        return call(function, x_BSD, inputs)

    def with_arguments(x_BSD: paddle.Tensor, *tensors: paddle.Tensor) -> Any:
        own = exchanged.with_tensors(tensors)
        y_BSD = function(x_BSD, dataclasses.replace(inputs, layer=own))
        return y_BSD if own.kept is None else (y_BSD, *own.kept)

    result = call(with_arguments, x_BSD, *exchanged.tensors)
    if not isinstance(result, tuple | list):
        return result
    y_BSD, *kept = result
    exchanged.keep(*kept)
    return y_BSD


class LayerExchange:
    """Exchange of tensors between the layers of one forward pass.

    Args:
        embeddings_BSLP: layer embeddings of the tokens; None: the model has none.
        sources: for each layer, the index of the layer whose keys and values it reads; None: the layer computes its
            own.
    """

    def __init__(self, embeddings_BSLP: paddle.Tensor | None, sources: Sequence[int | None]) -> None:
        self._embeddings = None if embeddings_BSLP is None else paddle.unbind(embeddings_BSLP, axis=2)
        self._sources, self._kept = sources, dict[int, KeysAndValues]()

    def of_layer(self, index: int) -> LayerTensors:
        """Return the tensors that layer `index` reads; the layers before it must have run."""
        source = self._sources[index]
        return LayerTensors(
            None if self._embeddings is None else self._embeddings[index],
            None if source is None else self._kept[source],
            index in self._sources,
        )

    def keep(self, index: int, exchanged: LayerTensors) -> None:
        """Store the keys and values of layer `index` for later layers."""
        if exchanged.kept is not None:
            self._kept[index] = exchanged.kept


def run_layer(
    exchange: LayerExchange | None,
    layer: Callable[..., paddle.Tensor],
    index: int,
    x_BSD: paddle.Tensor,
    inputs: Any,
    plan: RecomputePlan | None = None,
) -> paddle.Tensor:
    """Run layer `index` of a decoder on hidden states [B, S, D].

    Args:
        exchange: tensors of the pass; None: layers exchange only hidden states.
        layer: the decoder layer.
        index: index of the layer.
        x_BSD: hidden states before the layer.
        inputs: `AttentionInputs` of the pass.
        plan: recomputation plan; None: no recomputation.
    """

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments) if plan is None else plan.run_layer(function, index, *arguments)

    if exchange is None:
        return call(layer, x_BSD, inputs)
    exchanged = exchange.of_layer(index)
    y_BSD = call_with_tensors(call, layer, x_BSD, dataclasses.replace(inputs, layer=exchanged))
    exchange.keep(index, exchanged)
    return y_BSD

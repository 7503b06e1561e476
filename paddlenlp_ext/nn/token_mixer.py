"""Base classes of the layers that mix the positions of a document: attention, short convolution, Mamba-2 and others.

The output of a mixer at a position depends only on the document of the position, and on the earlier positions of its
parent document. The other documents in a pack have no effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import paddle
from paddle import nn

from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.ops.attention.key_value_cache import StateShapes


class TokenMixer(nn.Layer):
    """Base class of token mixers, which map hidden states [B, S, D] to [B, S, D].

    Attributes:
        attribute: name of the mixer in a decoder layer.
        input_names: names of the linear layers that read the hidden states.
        latent_names: names of the linear layers that read latents; empty without latent attention.
        output_name: name of the linear layer that returns the output of the mixer.
        implementation: backend of the attention op; None: the best available backend.
    """

    attribute: ClassVar[str]
    input_names: tuple[str, ...]
    latent_names: tuple[str, ...] = ()
    output_name: ClassVar[str] = "o_proj"

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.implementation: str | None = None

    @property
    def output_layer(self) -> Linear:
        """Linear layer that returns the output of the mixer, or the adapter around the layer."""
        return getattr(self, self.output_name)

    def state_shapes(self, dtype: paddle.dtype) -> StateShapes:
        """Return the shapes and dtypes of the state of one row in a key-value cache; attention has no state.

        Args:
            dtype: dtype of the outputs of linear layers.
        """
        return []


class MixerShape(ABC):
    """Sizes of a token mixer other than attention.

    Attributes:
        kind: name of this kind of layer in messages.
        supports_float16: whether the mixer can be trained in float16.
    """

    kind: ClassVar[str]
    supports_float16: ClassVar[bool] = True

    @abstractmethod
    def build(self, layer_index: int) -> TokenMixer | None:
        """Build the mixer of one layer; return None for a layer without a mixer."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Number of weights in the linear layers."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """Number of channels that the output layer of the mixer reads."""

    @abstractmethod
    def saved_size(self, in_cpp: bool) -> float:
        """Return the number of values per position that are saved for the backward pass.

        The inputs of the mixer and of its output layer, and values with one element per head, are not counted.

        Args:
            in_cpp: whether the C++ library runs the ops that it implements.
        """

    @property
    def sharded_sizes(self) -> dict[str, int]:
        """Sizes that the tensor-parallel degree must divide, by name in messages."""
        return {}


@dataclass(frozen=True, kw_only=True)
class SideMixer:
    """Token mixer beside attention in every layer, as in Falcon H1; both read the same norm.

    Attributes:
        shape: sizes of the mixer.
        scales: factors of the input and of the output of the mixer.
        attention_scales: factors of the input and of the output of attention.
    """

    shape: MixerShape
    scales: tuple[float, float] = (1.0, 1.0)
    attention_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class NoMixer(MixerShape):
    """Sizes of a layer without a token mixer."""

    kind = "feed-forward without a token mixer"
    num_weights = 0
    output_size = 0

    def build(self, layer_index: int) -> None:
        return None

    def saved_size(self, in_cpp: bool) -> float:
        return 0.0

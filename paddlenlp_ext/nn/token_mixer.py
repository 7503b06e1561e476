"""Base class of the layers that mix the positions of a document: attention and short convolution.

A mixer sees only the document of a position and the earlier positions of its parent document. The output of a mixer
therefore does not depend on the other documents in a pack.
"""

from __future__ import annotations

from typing import ClassVar

from paddle import nn

from paddlenlp_ext.nn.linear import Linear


class TokenMixer(nn.Layer):
    """Base class of token mixers, which map hidden states [B, S, D] to [B, S, D].

    Attributes:
        attribute: name of the mixer in a decoder layer.
        input_names: names of the linear layers that read the hidden states.
        latent_names: names of the linear layers that read latents; empty without latent attention.
        o_proj: linear layer that returns the output of the mixer.
        implementation: backend of the attention op; None: the best available backend.
    """

    attribute: ClassVar[str]
    input_names: tuple[str, ...]
    latent_names: tuple[str, ...] = ()
    o_proj: Linear

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.implementation: str | None = None

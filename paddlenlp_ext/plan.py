"""The words in which a model family says how it is cut over devices.

A tensor plan maps a layer's name pattern to a style; only `parallel/tensor.py` knows which axis a style cuts.
"""

from __future__ import annotations

from typing import Literal

Style = Literal["colwise", "rowwise", "vocab", "replicated"]
"""colwise: outputs are cut; rowwise: inputs are cut; vocab: rows of an embedding or head are cut."""

TensorPlan = dict[str, Style]
"""`{"model.layers.*.self_attn.o_proj": "rowwise", ...}`; `*` stands for one part of a dotted name."""

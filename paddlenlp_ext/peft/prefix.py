"""Prefix tuning (Li and Liang 2021, arXiv 2101.00190): learned keys and values before every document, in every layer.

    attention(q, [K_prefix; K], [V_prefix; V])        [K_prefix, V_prefix] of layer i: P(i), learned
    with `projection`: [K_prefix, V_prefix] = tanh(E W_1^T + b_1) W_2(i)^T + b_2(i), of which all is learned

The prefix has the shape of the model's keys, so that grouped queries need nothing more. It takes positions 0 to P-1 and
a document's own begin at P, as in Hugging Face PEFT; a sliding window passes over it as over any position. Learned keys
are used as they are, not rotated. They begin as what some tokens leave in every layer (better than noise, section 7.4);
those of a projection begin at random. With `projection` every layer makes its own keys and values from E, so that
recomputing a layer needs nothing of the others.

Shapes: P prefix tokens, K key-value heads, H head dimension, E = K * H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.prefix_layers import PrefixAttention, PrefixModel, in_layer_order
from paddlenlp_ext.peft.ranges import require_choice, require_share, require_whole
from paddlenlp_ext.peft.registry import PEFT_METHODS

STORED = "prompt_embeddings"
STARTS = ("vocab", "random")
_LEARNED_PROJECTION = "prefix_encoder."


@PEFT_METHODS.register("prefix_tuning")
@dataclass(kw_only=True)
class PrefixTuningConfig(PeftConfig):
    """Options of prefix tuning.

    Raises:
        ValueError: a value out of its range.
    """

    starts_from_weights: ClassVar[bool] = True
    peft_type: ClassVar[str] = "PREFIX_TUNING"
    mergeable: ClassVar[bool] = False
    starts_as_base: ClassVar[bool] = False
    own_keys: ClassVar[Mapping[str, str]] = {STORED: STORED}
    model_class: ClassVar[type[nn.Layer] | None] = PrefixModel
    paddlenlp_config: ClassVar[str | None] = "prefix_config.json"
    paddlenlp_array: ClassVar[str | None] = "pre_caches.npy"
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"init", "projection_hidden_size"}

    path: str | None = option(None, help="Folder of a prefix to start from; its structure is taken.", key="prefix_path")
    num_tokens: int = option(
        128,
        help="Length of the prefix.",
        minimum=1,
        maximum=65536,
        key="num_prefix_tokens",
        arguments=("num_virtual_tokens",),
    )
    init: str = option(
        "vocab",
        help="Start: what tokens drawn at random leave in every layer (vocab), or small noise (random).",
        choices=STARTS,
        key="prefix_init",
    )
    projection: bool = option(
        False, help="Learn the prefix through a network of two layers, which can be steadier.", key="prefix_projection"
    )
    projection_hidden_size: int | None = option(
        None,
        help="Width of that network. Unset: that of a layer's keys.",
        minimum=1,
        key="prefix_projection_hidden_size",
        arguments=("encoder_hidden_size",),
    )
    dropout: float = option(0.0, help="Dropout on the prefix while training.", minimum=0, below=1, key="prefix_dropout")

    def __post_init__(self) -> None:
        require_whole("num_prefix_tokens", self.num_tokens)
        require_choice("prefix_init", self.init, STARTS)
        require_share("prefix_dropout", self.dropout)
        if self.projection_hidden_size is not None:
            require_whole("prefix_projection_hidden_size", self.projection_hidden_size)

    def targets(self, model: nn.Layer) -> list[str]:
        return [name for name, _ in model.named_sublayers() if name.rpartition(".")[2] == "self_attn"]

    def wrap(self, name: str, base: nn.Layer, seed: int) -> PrefixAttention:
        hidden_size = None
        if self.projection:
            hidden_size = self.projection_hidden_size or base.k_proj.out_features
        return PrefixAttention(base, self.num_tokens, hidden_size, self.dropout, seed, name)

    def warm_start(self, stored: PeftConfig) -> PrefixTuningConfig:
        assert isinstance(stored, PrefixTuningConfig)
        return dataclasses.replace(stored, path=self.path, dropout=self.dropout)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        shape = model.config
        width = shape.num_key_value_heads * shape.head_dim
        return {
            "num_virtual_tokens": self.num_tokens,
            "num_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_key_value_heads,
            "token_dim": width,
            "num_transformer_submodules": 1,
            "prefix_projection": self.projection,
            "encoder_hidden_size": self.projection_hidden_size or width,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PrefixTuningConfig:
        read = {"num_virtual_tokens", "prefix_projection", "encoder_hidden_size"}
        read |= {"num_layers", "num_attention_heads", "token_dim", "init_weights"}  # the tensors and the model say it
        if fields.get("num_transformer_submodules") in (None, 1):
            read.add("num_transformer_submodules")
        refuse_unread_fields(fields, read)
        return cls(
            num_tokens=required_field(fields, "num_virtual_tokens"),
            init="random",  # what comes first is overwritten by what is stored
            projection=bool(fields.get("prefix_projection")),
            projection_hidden_size=fields.get("encoder_hidden_size"),
        )

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Keys and values of all layers side by side, [P, layers * 2 * E]; what makes them beside it, to train on."""
        if not self.projection:
            return {STORED: paddle.concat([tensors[name].flatten(1) for name in in_layer_order(tensors)], axis=1)}
        made = PrefixModel.projected({name: tensor.astype("float32") for name, tensor in tensors.items()})
        return {STORED: paddle.concat(made, axis=1), **tensors}

    def for_tensors(self, names: Collection[str]) -> PrefixTuningConfig:
        """A projection that was left out (PEFT keeps its result alone) leaves a prefix without one."""
        if any(name.startswith(_LEARNED_PROJECTION) for name in names):
            return self
        return dataclasses.replace(self, projection=False, projection_hidden_size=None)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a projection made is beside it in the file, and is made again."""
        return {name: value for name, value in tensors.items() if not (self.projection and name == STORED)}

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> PrefixTuningConfig:
        dropout = fields.get("prefix_dropout") or 0.0
        return cls(num_tokens=required_field(fields, "num_prefix_tokens"), init="random", dropout=dropout)

    @classmethod
    def from_paddlenlp_array(cls, value: np.ndarray) -> dict[str, np.ndarray]:
        """PaddleNLP's `pre_caches.npy` [layers, 2, K, P, H]. There positions of a document begin at 0.

        Raises:
            ValueError: the array has another shape.
        """
        if value.ndim != 5 or value.shape[1] != 2:
            raise ValueError(f"{cls.paddlenlp_array}: a shape of {list(value.shape)}, not [layers, 2, K, P, H].")
        per_layer = value.transpose(0, 3, 1, 2, 4)
        return {
            f"model.layers.{index}.self_attn.{PrefixModel.UNSHIFTED}": np.ascontiguousarray(prefix_P2KH)
            for index, prefix_P2KH in enumerate(per_layer)
        }

"""Description of a family's GGUF files, and the parts that several families have in common.

llama.cpp's converter changes some tensors. Reading undoes it, and writing does it:

- It permutes the query and key rows of some families that rotate the halves of a head, to neighbouring channels
  (`permutes`).
- It stores the scale of norms, 1 + w, instead of w (`norm_offset`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource

PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PRE_NORM = {**PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORM = {
    **PROJECTIONS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICH = {**POST_NORM, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True)
class Key:
    """Number or flag of the metadata that config.json has too.

    Attributes:
        name: key in the metadata, without the architecture's prefix.
        kind: int, float or bool.
        default: value of files without the key; None: all files have it.
        minimum: smallest valid value of an int.
    """

    name: str
    kind: type[int] | type[float] = int
    default: Any = None
    minimum: int = 1

    def read(self, file: GgufFile) -> Any:
        """Return the value of a file.

        Raises:
            ValueError: the value is missing, not of this kind, or less than the minimum.
        """
        if self.kind is int:
            return count(file, self.name, self.default, self.minimum)
        if self.kind is float:
            return number(file, self.name, self.default)
        key = file.architecture_key(self.name)
        return file.require(key, bool) if self.default is None else file.get(key, bool, self.default)

    def stored(self, value: Any) -> Any:
        """Return the value that a file has for `value` in config.json; None if it has none."""
        value = self.default if value is None else value
        return None if value is None else self.kind(value)


def undivided(tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """Return the tensors unchanged."""
    return dict(tensors)


@dataclass(frozen=True)
class Architecture:
    """Layout of a family's GGUF files.

    Attributes:
        name: `general.architecture`.
        class_name: name of the model's class in config.json.
        in_block: layer names in Hugging Face's models by the names in a block `blk.N.`; `{}` stands for the index of
            an expert, the first axis of a stored tensor. Names with an ending stand for one tensor of a layer.
        keys: metadata by the names of the same values in config.json, besides those that all families have.
        constants: keys of config.json that files do not have, with the values of the published models.
        settings: function from a file to keys of config.json that follow from several values or from tensors.
        has_experts: whether the models have experts, as files with an `expert_count` of at least 1.
        reads: whether the family reads a file of this name, which other families' files share.
        permutes: whether the rows of queries and keys are permuted.
        norm_offset: number that was added to the weights of norms.
        norm_epsilon: name of the norms' epsilon, in the metadata and in config.json.
        has_window: whether the family has sliding windows.
        is_partly_rotated: whether the rotation may leave channels of a head as they are.
        truncates_yarn: whether YaRN rounds the bounds between scaled and unscaled frequencies to whole ones.
        is_latent: whether keys and values are computed from latents.
        vectors: endings of the Hugging Face names of matrices of one row, which files store as vectors.
        restore: function from the stored tensors, under the names of `in_block`, to those of Hugging Face's files.
        divide: the inverse of `restore` for the tensors of a model and its config (`DecoderConfig`).
    """

    name: str
    class_name: str
    in_block: Mapping[str, str]
    keys: Mapping[str, Key] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    has_experts: bool = False
    reads: Callable[[GgufFile], bool] = lambda file: True
    permutes: bool = False
    norm_offset: float = 0.0
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    has_window: bool = False
    is_partly_rotated: bool = False
    truncates_yarn: bool = True
    is_latent: bool = False
    vectors: tuple[str, ...] = ()
    restore: Callable[[WeightSource], WeightSource] = lambda source: source
    divide: Callable[[Mapping[str, LazyTensor], Any], dict[str, LazyTensor]] = undivided

    @property
    def has_parts(self) -> bool:
        """True if files store some tensors in parts."""
        return self.divide is not undivided

    def config_values(self, file: GgufFile) -> dict[str, Any]:
        """Return the keys of config.json that only this family has, or reads from other metadata.

        Raises:
            ValueError: metadata are missing or damaged, or describe a model that the family does not support.
        """
        read = {own: key.read(file) for own, key in self.keys.items()}
        return {**read, **self.constants, **self.settings(file)}


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal equal to a stored float32: 1e-05 instead of 9.99999974737e-06."""
    return float(str(np.float32(value)))


def count(file: GgufFile, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31) -> int:
    """Return a whole number under the architecture's prefix; without a default, it must exist.

    Raises:
        ValueError: the number is missing, less than the minimum or greater than the maximum.
    """
    key = file.architecture_key(key)
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if value < minimum:
        raise ValueError(f"{file.path}: {key} is {value}, less than {minimum}; the file is damaged")
    if value > maximum:
        raise ValueError(f"{file.path}: {key} is {value}, more than {maximum}; the file is damaged")
    return value


def number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a number under the architecture's prefix; without a default, it must exist."""
    key = file.architecture_key(key)
    return shortest_decimal(file.require(key, float) if default is None else file.get(key, float, default))


def has_bias(file: GgufFile, name: str) -> bool:
    """Return whether a layer of the first block has a bias."""
    return f"blk.0.{name}.bias" in file.tensors


def has_window(file: GgufFile) -> bool:
    """Return whether the model has sliding windows."""
    return bool(count(file, "attention.sliding_window", 0, minimum=0))


def attention_bias(file: GgufFile) -> dict[str, bool]:
    """Return `attention_bias` of config.json, which stands for all projections of the attention.

    Raises:
        ValueError: only some of them have a bias.
    """
    if has_bias(file, "attn_q") != has_bias(file, "attn_output"):
        raise ValueError(f"{file.path}: a bias on only some attention projections, which config.json cannot express")
    return {"attention_bias": has_bias(file, "attn_q")}


def projection_biases(file: GgufFile) -> dict[str, bool]:
    """Return `attention_bias` and `mlp_bias` of config.json.

    Raises:
        ValueError: see `attention_bias`.
    """
    return {**attention_bias(file), "mlp_bias": has_bias(file, "ffn_gate")}

"""Description of the files of one architecture, and the helpers of the tables in architectures.py and experts.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf import GgufFile
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


@dataclass(frozen=True)
class Architecture:
    """Layout of the files of one `general.architecture`.

    Attributes:
        model_type, class_name: names in config.json.
        in_block: layer names in Hugging Face's models by the names in a block `blk.N.`; `{}` stands for the index of
            an expert, the first axis of a stored tensor. Names with an ending stand for one tensor of a layer.
        permutes: whether the rows of queries and keys are permuted.
        norm_offset: number that was added to the weights of norms.
        norm_epsilon: name of the norms' epsilon, in the metadata and in config.json.
        has_window: whether the family has sliding windows.
        is_partly_rotated: whether the rotation may leave channels of a head as they are.
        truncates_yarn: whether YaRN rounds the bounds between scaled and unscaled frequencies to whole ones.
        is_latent: whether keys and values are computed from latents.
        restore: function from the stored tensors, under the names of `in_block`, to those of Hugging Face's files.
        settings: function from the file to further keys of config.json.
    """

    model_type: str
    class_name: str
    in_block: Mapping[str, str]
    permutes: bool = False
    norm_offset: float = 0.0
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    has_window: bool = False
    is_partly_rotated: bool = False
    truncates_yarn: bool = True
    is_latent: bool = False
    restore: Callable[[WeightSource], WeightSource] = lambda source: source
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {}


def number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a number under the architecture's prefix; without a default, it must exist."""
    key = file.architecture_key(key)
    return shortest_decimal(file.require(key, float) if default is None else file.get(key, float, default))


def has_bias(file: GgufFile, name: str) -> bool:
    """Return whether a layer of the first block has a bias."""
    return f"blk.0.{name}.bias" in file.tensors


def attention_bias(file: GgufFile) -> dict[str, bool]:
    """Return `attention_bias` of config.json, which stands for all projections of the attention.

    Raises:
        ValueError: only some of them have a bias.
    """
    if has_bias(file, "attn_q") != has_bias(file, "attn_output"):
        raise ValueError(f"{file.path}: a bias on only some attention projections, which config.json cannot express")
    return {"attention_bias": has_bias(file, "attn_q")}

"""Description of a model family's GGUF files (tensor names and metadata), with tables and checks that families share.

The converter of llama.cpp changes some tensors. Reading undoes the changes, and writing applies them:

- In some families, query and key rows are permuted so that the two channels of a rotary pair are adjacent (`permutes`).
- In some families, norm weights are stored as 1 + w instead of w (`norm_offset`).
- In some families, decay rates are stored as -exp(x) instead of x (`logarithms`).
- In some families, rows and columns are stored in a different order (`row_order`, `column_order`).

Some families have options that files cannot express. Writing converts the model to an equivalent model without these
options (`equivalent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Name of a tensor outside the blocks -> name of the Hugging Face layer."""
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
    """GGUF metadata key that corresponds to a key of config.json.

    Attributes:
        name: metadata key without the prefix of the architecture.
        kind: type of the value (int, float or bool).
        default: value if the key is missing; None: the key is required.
        minimum: smallest valid value, for an int.
    """

    name: str
    kind: type[int] | type[float] = int
    default: Any = None
    minimum: int = 1

    def read(self, file: GgufFile) -> Any:
        """Return the value of the key in a file.

        Raises:
            ValueError: the value is missing, has the wrong type, or is less than the minimum.
        """
        if self.kind is int:
            return count(file, self.name, self.default, self.minimum)
        if self.kind is float:
            return number(file, self.name, self.default)
        key = file.architecture_key(self.name)
        return file.require(key, bool) if self.default is None else file.get(key, bool, self.default)

    def stored(self, value: Any) -> Any:
        """Convert a value of config.json (None: use `default`) to a metadata value; return None to omit the key."""
        value = self.default if value is None else value
        return None if value is None else self.kind(value)


@dataclass(frozen=True)
class Architecture:
    """Layout of a model family's GGUF files.

    Attributes:
        name: `general.architecture`.
        class_name: name of the model class in config.json.
        in_block: name within a GGUF block `blk.N.` -> name within a decoder layer of the Hugging Face model. `{}`
            stands for the index of an expert; the stored tensor stacks the experts along its first axis. A name without
            a suffix such as `.weight` covers all tensors of a layer.
        top_level: name of a tensor outside the blocks -> name of the Hugging Face layer.
        keys: key of config.json -> metadata key, in addition to the keys that all families share.
        constants: keys of config.json without a metadata key, with the values of the published models.
        settings: function that derives keys of config.json from several metadata values or from tensors.
        has_experts: whether the family is a mixture of experts, whose files have an `expert_count` of at least 1.
        has_dense_layers: whether layers may have a dense feed-forward layer; other families' files may lack
            `feed_forward_length`.
        reads: function that recognizes the files of this family among files with the same `general.architecture`.
        writes: function that returns whether a model (`DecoderConfig`) of the family has this layout.
        variants: layouts of other models of the family, which have a different `general.architecture`.
        permutes: whether the rows of query and key projections are permuted.
        norm_offset: offset that is added to norm weights in files.
        plain_norms: suffixes of the Hugging Face names of norm weights that files store without the offset.
        logarithms: suffixes of the Hugging Face names of tensors x that files store as -exp(x).
        row_order: function that returns, for each row of a stored tensor, its index in the Hugging Face tensor; called
            with the Hugging Face name and the config (`DecoderConfig`); None: the order is the same. `restore` must
            undo the order.
        column_order: function like `row_order`, for columns.
        norm_epsilon: name of the epsilon of norms in the metadata and in config.json.
        has_window: whether the family has sliding-window attention.
        is_partly_rotated: whether RoPE may rotate only some channels of a head (`partial_rotary_factor`).
        truncates_yarn: whether YaRN rounds the bounds of its ramp to whole dimensions (`truncate`).
        yarn_multiplier: factor of `mscale_all_dim` in the metadata; None: YaRN in the files has no `mscale_all_dim`.
        is_latent: whether the family has multi-head latent attention (MLA).
        has_layers_without_attention: whether `attention.head_count_kv` is a list with one number per layer, which is 0
            in layers without attention, such as short convolutions.
        has_single_blocks: whether layers have one block each, so that `feed_forward_length` is a list with 0 for layers
            without a feed-forward or experts.
        stores_merges: whether files store the merges of a SentencePiece BPE tokenizer, instead of scores of its tokens.
        unadapted: GGUF names, without block and suffix, of linear layers to which llama.cpp applies no adapters.
        has_layer_shapes: whether layers may differ in the sizes of heads and feed-forwards, which `settings` returns.
        squeezed: name suffix of Hugging Face tensors -> axis of length 1 that files omit.
        restore: function that converts the stored tensors, renamed by `in_block`, to the tensors of the Hugging Face
            checkpoint.
        equivalent: function that returns the tensors and the config (`DecoderConfig`) of an equivalent model that files
            can express, called with the tensors and the config of a model.
        split: inverse of `restore`, called with the tensors and the config (`DecoderConfig`) of a model; None: each
            Hugging Face tensor is stored as one GGUF tensor, or the tensors of experts are stacked.
        metadata: function that computes metadata from a config (`DecoderConfig`), without the prefix of the
            architecture; the inverse of `settings`.
        tensor_metadata: function that converts Hugging Face tensors to metadata with full key names.
    """

    name: str
    class_name: str
    in_block: Mapping[str, str]
    top_level: Mapping[str, str] = field(default_factory=lambda: TOP_LEVEL)
    keys: Mapping[str, Key] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    has_experts: bool = False
    has_dense_layers: bool = True
    reads: Callable[[GgufFile], bool] = lambda file: True
    writes: Callable[[Any], bool] = lambda config: True
    variants: tuple[Architecture, ...] = ()
    permutes: bool = False
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    logarithms: tuple[str, ...] = ()
    row_order: Callable[[str, Any], np.ndarray | None] = lambda name, config: None
    column_order: Callable[[str, Any], np.ndarray | None] = lambda name, config: None
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    has_window: bool = False
    is_partly_rotated: bool = False
    truncates_yarn: bool = True
    yarn_multiplier: float | None = None
    is_latent: bool = False
    has_layers_without_attention: bool = False
    has_single_blocks: bool = False
    stores_merges: bool = False
    unadapted: tuple[str, ...] = ()
    has_layer_shapes: bool = False
    squeezed: Mapping[str, int] = field(default_factory=dict)
    restore: Callable[[WeightSource], WeightSource] = lambda source: source
    equivalent: Callable[[Mapping[str, LazyTensor], Any], tuple[Mapping[str, LazyTensor], Any]] = (
        lambda tensors, config: (tensors, config)
    )
    split: Callable[[Mapping[str, LazyTensor], Any], dict[str, LazyTensor]] | None = None
    metadata: Callable[[Any], dict[str, Any]] = lambda config: {}
    tensor_metadata: Callable[[Mapping[str, LazyTensor]], dict[str, Any]] = lambda tensors: {}

    def config_values(self, file: GgufFile) -> dict[str, Any]:
        """Return the keys of config.json that are specific to this family.

        Raises:
            ValueError: metadata is missing or damaged, or describes an unsupported model.
        """
        read = {name: key.read(file) for name, key in self.keys.items()}
        return {**read, **self.constants, **self.settings(file)}

    def converts_values(self, name: str) -> bool:
        """Return whether the stored values differ from the values of the Hugging Face tensor `name`."""
        return self._offset(name) != 0 or name.endswith(self.logarithms)

    def to_stored(self, name: str, values: np.ndarray) -> np.ndarray:
        """Convert values of the Hugging Face tensor `name` to the float32 values that files store."""
        if name.endswith(self.logarithms):
            return -np.exp(values.astype(np.float64)).astype(np.float32)
        return values + np.float32(self._offset(name)) if self._offset(name) else values

    def from_stored(self, name: str, values: np.ndarray) -> np.ndarray:
        """Convert stored values to the Hugging Face tensor `name`; the inverse of `to_stored`, up to rounding.

        Raises:
            ValueError: the values have no logarithm.
        """
        if not name.endswith(self.logarithms):
            return values - np.float32(self._offset(name)) if self._offset(name) else values
        if not (values < 0).all():
            raise ValueError(f"the stored values of {name} are not all negative")
        return np.log(-values.astype(np.float64)).astype(np.float32)

    def _offset(self, name: str) -> float:
        return self.norm_offset if "norm" in name and not name.endswith(self.plain_norms) else 0.0

    def squeezed_axis(self, name: str) -> int | None:
        """Return the axis that files omit from the Hugging Face tensor `name`; None if files have all axes."""
        return next((axis for suffix, axis in self.squeezed.items() if name.endswith(suffix)), None)


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to a stored float32, such as 1e-05 for 9.99999974737e-06."""
    return float(str(np.float32(value)))


def count(file: GgufFile, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31) -> int:
    """Return an integer from the metadata.

    Args:
        file: the model.
        key: metadata key without the prefix of the architecture.
        default: value if the key is missing; None: the key is required.
        minimum: smallest valid value.
        maximum: largest valid value.

    Raises:
        ValueError: the key is missing, or the value has the wrong type or is outside the range.
    """
    key = file.architecture_key(key)
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if value < minimum:
        raise ValueError(f"{file.path}: {key} is {value}, below the minimum {minimum}; the file is damaged")
    if value > maximum:
        raise ValueError(f"{file.path}: {key} is {value}, above the maximum {maximum}; the file is damaged")
    return value


def number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a floating-point value from the metadata; see `count` for the arguments."""
    key = file.architecture_key(key)
    return shortest_decimal(file.require(key, float) if default is None else file.get(key, float, default))


def counts_by_layer(file: GgufFile, key: str, default: int | None = None) -> list[int]:
    """Return an integer for each layer, from a list or a single number in the metadata; see `count` for the arguments.

    Raises:
        ValueError: the value has the wrong type, the list does not have one item for each layer, or a number is outside
            the range.
    """
    name, layers = file.architecture_key(key), count(file, "block_count")
    if not isinstance(file.metadata.get(name), list):
        return [count(file, key, default)] * layers
    counts = file.require_list(name, int)
    if len(counts) != layers:
        raise ValueError(f"{file.path}: {name} has {len(counts)} items for {layers} layers; the file is damaged")
    if not all(0 <= each <= 2**31 for each in counts):
        raise ValueError(f"{file.path}: {name} has items outside 0 to 2^31; the file is damaged")
    return counts


def kv_heads_by_layer(file: GgufFile) -> list[int]:
    """Return the number of key-value heads of each layer; see `counts_by_layer`."""
    return counts_by_layer(file, "attention.head_count_kv")


def has_bias(file: GgufFile, name: str) -> bool:
    """Return whether the layer `name` has a bias in the first block."""
    return f"blk.0.{name}.bias" in file.tensors


def has_window(file: GgufFile) -> bool:
    """Return whether the metadata of a file specifies sliding-window attention."""
    return bool(count(file, "attention.sliding_window", 0, minimum=0))


def attention_bias(file: GgufFile) -> dict[str, bool]:
    """Return `attention_bias` of config.json, which applies to all attention projections.

    Raises:
        ValueError: only one of the query and output projections has a bias.
    """
    if has_bias(file, "attn_q") != has_bias(file, "attn_output"):
        raise ValueError(
            f"{file.path}: only some attention projections have a bias, which config.json cannot express; use the "
            "model's safetensors folder"
        )
    return {"attention_bias": has_bias(file, "attn_q")}


def projection_biases(file: GgufFile) -> dict[str, bool]:
    """Return `attention_bias` and `mlp_bias` of config.json.

    Raises:
        ValueError: see `attention_bias`.
    """
    return {**attention_bias(file), "mlp_bias": has_bias(file, "ffn_gate")}

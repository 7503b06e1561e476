"""GGUF layout of decoders with gated delta nets and gated attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import PROJECTIONS, QK_NORMS, Architecture, Key, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.tiled_heads import GroupedHeads, column_order, head_sizes, row_order

_IN_BLOCK = {
    **PROJECTIONS,
    **QK_NORMS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_KEYS = {
    "linear_conv_kernel_dim": Key("ssm.conv_kernel"),
    "linear_key_head_dim": Key("ssm.state_size"),
    "linear_num_key_heads": Key("ssm.group_count"),
    "linear_num_value_heads": Key("ssm.time_step_rank"),
}


def delta_net_architecture(
    name: str,
    class_name: str,
    in_block: Mapping[str, str] | None = None,
    keys: Mapping[str, Key] | None = None,
    settings: Callable[[GgufFile], dict[str, Any]] = lambda file: {},
    squeezed: Mapping[str, int] | None = None,
    **fields: Any,
) -> Architecture:
    """Return the GGUF layout of a family. The arguments are attributes of `Architecture`.

    `in_block`, `keys`, `settings` and `squeezed` extend the entries that all families share.
    """
    return Architecture(
        name,
        class_name,
        {**_IN_BLOCK, **(in_block or {})},
        keys={**_KEYS, **(keys or {})},
        settings=lambda file: {**_settings(file), **settings(file)},
        norm_offset=1.0,
        plain_norms=("linear_attn.norm.weight",),
        logarithms=("linear_attn.A_log",),
        row_order=lambda name, config: row_order(name, next(iter(config.other_mixers), None)),
        column_order=lambda name, config: column_order(name, next(iter(config.other_mixers), None)),
        is_partly_rotated=True,
        restore=GroupedHeads,
        metadata=_metadata,
        squeezed={"linear_attn.conv1d.weight": 1, **(squeezed or {})},
        **fields,
    )


def _settings(file: GgufFile) -> dict[str, Any]:
    return {
        "full_attention_interval": count(file, "full_attention_interval", 4),
        "linear_value_head_dim": head_sizes(file).value_dim,
    }


def _metadata(config: Any) -> dict[str, Any]:
    """Return the metadata that has no counterpart among the keys of config.json.

    The multimodal RoPE assigns the channel pairs to three axes in turn.

    Raises:
        ValueError: llama.cpp does not support the head sizes.
    """
    keys, values = (config.value(f"linear_{name}_head_dim") for name in ("key", "value"))
    if keys != values:
        raise ValueError(
            f"a GGUF file cannot express heads with {keys} key channels and {values} value channels: "
            "llama.cpp supports only equal sizes"
        )
    interval = next((layer for layer, mixer in enumerate(config.mixers, start=1) if mixer is None), None)
    pairs = config.ropes[0].rotary_dim // 2
    return {
        "full_attention_interval": config.num_hidden_layers + 1 if interval is None else interval,
        "rope.dimension_sections": [*(len(range(axis, pairs, 3)) for axis in range(3)), 0],
        "ssm.inner_size": values * config.value("linear_num_value_heads"),
    }

"""Read the gated delta nets of a model from its config.json.

| key | meaning |
| --- | --- |
| `layer_types` | linear_attention (gated delta net) or full_attention, for each layer |
| `linear_num_key_heads`, `linear_num_value_heads` | heads of queries and keys, and of values |
| `linear_key_head_dim`, `linear_value_head_dim` | channels of a head |
| `linear_conv_kernel_dim` | taps of the convolution |
"""

from __future__ import annotations

from paddlenlp_ext.models.registry import ConfigReader
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaShape


def delta_net_mixers(
    config: ConfigReader, make: type[GatedDeltaShape], norm_epsilon: float, beta_scale: float = 1.0
) -> tuple[GatedDeltaShape | None, ...]:
    """Return the sizes of the gated delta net of each layer, with None for layers with attention.

    Args:
        config: config of the model.
        make: class of the sizes.
        norm_epsilon: epsilon of the norm in a gated delta net.
        beta_scale: see `GatedDeltaShape`.

    Raises:
        ValueError: `layer_types` has an unknown entry, its length is not the number of layers, or the number of value
            heads is not a multiple of the number of key heads.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    if {*types} - {"full_attention", "linear_attention"} or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be full_attention or linear_attention for each of the {layers} layers, "
            f"got {len(types)} entries: {', '.join(sorted({*types}))}"
        )
    shape = make(
        hidden_size=config.size("hidden_size"),
        num_key_heads=config.size("linear_num_key_heads"),
        num_value_heads=config.size("linear_num_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        num_taps=config.size("linear_conv_kernel_dim"),
        norm_epsilon=norm_epsilon,
        beta_scale=beta_scale,
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads {shape.num_value_heads} in config.json is not a multiple of linear_num_key_heads "
            f"{shape.num_key_heads}"
        )
    return tuple(shape if kind == "linear_attention" else None for kind in types)

"""Config of families with experts (MoE): expert layers, routers, file layout and sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions
from paddlenlp_ext.sharding_spec import TensorPlan

EXPERT_FILES = {
    "mlp.experts.gate_up_proj.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down_proj.weight": ("mlp.experts.{}.down_proj.weight",),
}
"""Stacked expert tensors of the decoder, with the names of the single experts' tensors in the checkpoint."""

EXPERT_LAYOUT = StackedExperts(EXPERT_FILES)
"""File layout of families whose checkpoints differ from the parameters only in `EXPERT_FILES`."""


def expert_differences(
    config: ConfigReader,
    plan: TensorPlan,
    shape: ExpertShape,
    is_sparse: Callable[[int], bool] = lambda layer: True,
    file_layout: FileLayout = EXPERT_LAYOUT,
) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of a decoder with experts.

    The routers have an auxiliary loss if `output_router_logits` is true in config.json (default: false).

    Args:
        config: config of the model.
        plan: tensor plan of the decoder without experts.
        shape: sizes and router of an expert layer.
        is_sparse: function of a layer index that returns True for a layer with experts, False for a dense layer.
        file_layout: checkpoint layout of the family.

    Raises:
        ValueError: a token uses more experts than a layer has, or the group counts are invalid.
    """
    _check(shape)
    experts = tuple(shape if is_sparse(layer) else None for layer in range(config.size("num_hidden_layers")))
    coefficient = config.value("router_aux_loss_coef") if config.value("output_router_logits") else None
    return {
        "experts": experts,
        "router_loss": float(coefficient or 0.0),
        "tensor_plan": _with_experts(plan, experts),
        "file_layout": file_layout,
    }


def sigmoid_router(config: ConfigReader) -> RouterOptions:
    """Return the router of DeepSeek V3 (arXiv:2412.19437): sigmoid scores, correction biases, choice within groups."""
    return RouterOptions(
        kind="sigmoid",
        top_k=config.size("num_experts_per_tok"),
        normalizes=bool(config.value("norm_topk_prob")),
        scale=float(config.value("routed_scaling_factor")),
        num_groups=config.size("n_group"),
        chosen_groups=config.size("topk_group"),
        group_score="top2",
        correction_dims=1,
    )


def routed_expert_differences(
    config: ConfigReader, plan: TensorPlan, router: RouterOptions, is_sparse: Callable[[int], bool]
) -> dict[str, Any]:
    """Return `expert_differences` for DeepSeek's config keys. Routed and shared experts have equal sizes.

    Weights of multi-token-prediction (MTP) layers are not read.
    """
    inner, num_layers = config.size("moe_intermediate_size"), config.size("num_hidden_layers")
    more = range(num_layers, num_layers + (config.value("num_nextn_predict_layers") or 1))
    shape = ExpertShape(
        num_experts=config.size("n_routed_experts"),
        intermediate_size=inner,
        router=router,
        shared_size=inner * (config.value("n_shared_experts") or 0),
    )
    files = StackedExperts(EXPERT_FILES, unused=rf"model\.layers\.({'|'.join(map(str, more))})\..*")
    return expert_differences(config, plan, shape, is_sparse, files)


def router_overrides(config: Mapping[str, Any], coefficient: float | None) -> dict[str, Any]:
    """Return the config.json overrides for `router_aux_loss_coef` of a run; {} if the coefficient is None.

    Raises:
        ValueError: the family does not support an auxiliary loss.
    """
    if coefficient is None:
        return {}
    model_type = config.get("model_type")
    if model_type not in FAMILIES.names() or "router_aux_loss_coef" not in FAMILIES.get(model_type).defaults:
        raise ValueError(
            f"router_aux_loss_coef: models of model_type {model_type!r} have no auxiliary loss; remove the key"
        )
    return {"output_router_logits": coefficient > 0, "router_aux_loss_coef": coefficient}


def sparse_by_step(config: ConfigReader) -> Callable[[int], bool]:
    """Return Qwen's `is_sparse` function: every `decoder_sparse_step`-th layer, except layers in `mlp_only_layers`."""
    dense, step = config.value("mlp_only_layers") or (), config.size("decoder_sparse_step", default=1)
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def sparse_by_type(config: ConfigReader, num_dense: int = 0) -> Callable[[int], bool]:
    """Return the `is_sparse` function for `mlp_layer_types`; without this key, the first `num_dense` layers are dense.

    Raises:
        ValueError: `mlp_layer_types` has an unknown entry, or its length is not the number of layers.
    """
    num_layers = config.size("num_hidden_layers")
    types = config.value("mlp_layer_types") or ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types in config.json must be dense or sparse for each of the {num_layers} layers, got {types}"
        )
    return lambda layer: types[layer] == "sparse"


def _check(shape: ExpertShape) -> None:
    router = shape.router
    if router.top_k > shape.num_experts:
        raise ValueError(f"config.json: a token uses {router.top_k} experts, but a layer has only {shape.num_experts}")
    if shape.num_experts % router.num_groups or not 1 <= router.chosen_groups <= router.num_groups:
        raise ValueError(
            f"config.json divides {shape.num_experts} experts into {router.num_groups} groups, and chooses "
            f"{router.chosen_groups} groups; the groups must have equal sizes, and the number of chosen groups must be "
            f"1 to {router.num_groups}"
        )


def _with_experts(plan: TensorPlan, experts: Sequence[ExpertShape | None]) -> TensorPlan:
    """Return the tensor plan of a decoder with experts in some or all layers."""
    sparse = [shape for shape in experts if shape is not None]
    if not sparse:
        return plan
    shape = sparse[0]
    has_dense = shape.shared_name is None or len(sparse) < len(experts)
    dense = plan if has_dense else {name: style for name, style in plan.items() if ".mlp." not in name}
    layer = "model.layers.*.moe" if shape.shared_name is None else "model.layers.*.mlp"
    own: TensorPlan = {f"{layer}.experts": "experts", f"{layer}.{shape.router_name}": "replicated"}
    if shape.shared_size and shape.shared_name is not None:
        shared = f"{layer}.{shape.shared_name}"
        own |= {f"{shared}.up_proj": "colwise", f"{shared}.down_proj": "rowwise"}
        if shape.gated:
            own[f"{shared}.gate_proj"] = "colwise"
    if shape.latent_size:
        own |= {f"{layer}.fc1_latent_proj": "replicated", f"{layer}.fc2_latent_proj": "replicated"}
    if shape.gates_shared:
        own[f"{layer}.shared_expert_gate"] = "replicated"
    return {**dense, **own}

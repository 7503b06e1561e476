"""DeepSeek V2: multi-head latent attention, and experts chosen within groups. DeepSeek-AI 2024, arXiv:2405.04434."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.mla_tensors import LATENT_ATTENTION, JoinedLatents, latent_settings, split_latents
from paddlenlp_ext.checkpoint.gguf.moe_tensors import GROUPED_EXPERT_KEYS, ROUTED_EXPERTS, SHARED_EXPERTS
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.latent_attention_config import LATENT_DEFAULTS, complete_latent, latent_differences
from paddlenlp_ext.models.moe_config import routed_expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.nn.routers import RouterOptions


def latent_experts(
    config: ConfigReader, router: RouterOptions, is_sparse: Callable[[int], bool], **changes: Any
) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of latent attention, with experts in the layers chosen by `is_sparse`.

    Raises:
        ValueError: see `expert_differences`; or `moe_layer_freq` is not 1.
    """
    require(config, "moe_layer_freq", None, 1)
    latent = {**latent_differences(config), **changes}
    return {**latent, **routed_expert_differences(config, latent["tensor_plan"], router, is_sparse)}


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "scoring_func", None, "softmax")
    require(config, "topk_method", "greedy", "group_limited_greedy")
    require(config, "norm_topk_prob", None, False)
    first = config.value("first_k_dense_replace") or 0
    is_limited = config.value("topk_method") == "group_limited_greedy"
    router = RouterOptions(
        kind="softmax",
        top_k=config.size("num_experts_per_tok", default=6),  # transformers writes null for a model without experts
        normalizes=False,
        scale=float(config.value("routed_scaling_factor")),
        num_groups=config.size("n_group") if is_limited else 1,
        chosen_groups=config.size("topk_group") if is_limited else 1,
    )
    return latent_experts(config, router, lambda layer: layer >= first)


FAMILIES.register("deepseek_v2")(
    Family(
        "DeepseekV2ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            **LATENT_DEFAULTS,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        complete=complete_latent,
        is_translated_by_peft=True,
    )
)


def has_sigmoid_router(file: GgufFile) -> bool:
    """Return whether the routers of a GGUF file compute sigmoid scores (DeepSeek V3) instead of softmax scores.

    A file without `expert_gating_func` uses sigmoid scores if it contains correction biases.

    Raises:
        ValueError: the routers compute another kind of score.
    """
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    scores = count(file, "expert_gating_func", 0, minimum=0) or (2 if is_corrected else 1)
    if scores not in (1, 2):
        raise ValueError(
            f"{file.path}: {file.architecture} with expert_gating_func {scores} is not supported; known: 1 (softmax), "
            "2 (sigmoid)"
        )
    return scores == 2


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    is_limited = count(file, "expert_group_count", 1) > 1
    return {**latent_settings(file), "topk_method": "group_limited_greedy" if is_limited else "greedy"}


DEEPSEEK_GGUF = Architecture(
    "deepseek2",
    "DeepseekV2ForCausalLM",
    {
        **LATENT_ATTENTION,
        **ROUTED_EXPERTS,
        **SHARED_EXPERTS,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    keys=GROUPED_EXPERT_KEYS,
    settings=_gguf_settings,
    has_experts=True,
    reads=lambda file: not has_sigmoid_router(file),
    is_latent=True,
    yarn_multiplier=0.1,
    restore=JoinedLatents,
    split=split_latents,
)
ARCHITECTURES.register("deepseek_v2")(DEEPSEEK_GGUF)

"""Write OUT/: base, adapter and merged models made here, each with the logits computed here.

`check_adapter_in_peft.py` and `check_model_in_transformers.py` read them.

    python -m tests.golden.peer_checks.export_for_peers OUT [--model NAME_OR_PATH]

Without --model, tiny models of every family with odd sizes; with it, that model and one adapter.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.lora.expert_layers import shortest_parameters
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig
from paddlenlp_ext.peft.methods.boft import BOFTConfig
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.hira import HiRAConfig
from paddlenlp_ext.peft.methods.hra import HRAConfig
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.ln_tuning import LNTuningConfig
from paddlenlp_ext.peft.methods.loha import LoHaConfig
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig
from paddlenlp_ext.peft.methods.miss import MiSSConfig
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.peft.methods.olora import OLoRAConfig
from paddlenlp_ext.peft.methods.p_tuning import PTuningConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.shira import SHiRAConfig
from paddlenlp_ext.peft.methods.sora import SoRAConfig
from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.target_modules import linear_names
from paddlenlp_ext.quantization.config import QuantizationConfig
from tests.common.golden import set_golden_weights
from tests.golden.cases.model_cases import CASES, make_inputs

ADAPTERS = {
    "all_linear": LoRAConfig(rank=4),
    "rslora_some": LoRAConfig(rank=4, alpha=6, rslora=True, target_modules=["q_proj", "down_proj"]),
    "attention": LoRAConfig(rank=4, target_modules=[r".*self_attn\.(?!gate_proj).*"]),
    "one_layer": LoRAConfig(rank=3, target_modules=[r".*layers\.1\..*(up|v)_proj"]),
    "lokr": LoKrConfig(),
    "lokr_decomposed": LoKrConfig(rank=2, alpha=3, factor=4, decompose_both=True),
    "loha": LoHaConfig(rank=3),
    "ia3": IA3Config(),
    "hra": HRAConfig(rank=4),
    "hra_gram_schmidt": HRAConfig(rank=3, gram_schmidt=True, target_modules=["q_proj", "down_proj"]),
    "ln_tuning": LNTuningConfig(),
    "ia3_one_layer": IA3Config(target_modules=[r".*layers\.1\..*"], feedforward_modules=["down_proj", "o_proj"]),
    "prefix": PrefixTuningConfig(num_tokens=5),
    "prefix_projected": PrefixTuningConfig(num_tokens=5, projection=True, projection_hidden_size=7),
    "prompt": PromptTuningConfig(num_tokens=5),
    "p_tuning": PTuningConfig(num_tokens=5),
    "p_tuning_lstm": PTuningConfig(num_tokens=3, encoder="lstm", encoder_hidden_size=5),
    "tokens": TrainableTokensConfig(indices=(3, 50, 90)),
    "adalora": AdaLoRAConfig(init_r=4, target_r=2),
    "sora": SoRAConfig(rank=4),
    "oft": OFTConfig(),
    "moslora_as_lora": MoSLoRAConfig(rank=4, mixer_to_lora=True),
    "vera": VeRAConfig(rank=16),
    "vera_seeded": VeRAConfig(rank=16, save_projection=False, target_modules=["q_proj", "down_proj"]),
    "dora": DoRAConfig(rank=4),
    "dora_some": DoRAConfig(rank=4, alpha=6, rslora=True, target_modules=["q_proj", "down_proj"]),
    "pissa": PiSSAConfig(rank=4),
    "pissa_some": PiSSAConfig(rank=4, alpha=6, rslora=True, target_modules=["q_proj", "down_proj"]),
    "lora_ga": LoRAGAConfig(rank=4),
    "boft": BOFTConfig(),
    "miss": MiSSConfig(rank=5),
    "miss_mini": MiSSConfig(rank=6, variant="mini", mini_rank=4),
    "miss_bat": MiSSConfig(rank=4, variant="bat"),
    "hira": HiRAConfig(rank=4),
    "shira": SHiRAConfig(rank=2, target_modules=["q_proj", "down_proj"]),
    "olora": OLoRAConfig(rank=4),
    "modules_to_save": LoRAConfig(rank=4, modules_to_save=["lm_head", "norm"]),
    "tables": LoRAConfig(rank=4, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "token_rows": LoRAConfig(rank=4, trainable_token_indices=(3, 50, 90)),
    "biases": LoRAConfig(rank=4, trainable_bias="adapted", exclude_modules=["k_proj"]),
    "oft_series": OFTConfig(num_blocks=4, neumann_terms=5, block_share=True),
}

EVERYWHERE = {"all_linear": ADAPTERS["all_linear"]}
OF_ATTENTION = {"attention": ADAPTERS["attention"]}
"""Adapters of models with experts: PEFT takes `gate_proj` in `target_modules` for experts (peft_experts.py)."""
FUSED = {name: ADAPTERS[name] for name in ("rslora_some", "one_layer", "dora", "pissa", "modules_to_save")}
"""Adapters of models whose files have fused layers; PEFT adapts those."""


def of_fused_layers(model: CausalLM) -> dict[str, LoRAConfig]:
    """Return the adapters of a model whose files have fused layers, one of which is saved."""
    *_, fused = model.config.fused_layers
    return {**FUSED, "parts_to_save": LoRAConfig(rank=4, target_modules=["o_proj"], modules_to_save=[fused])}


def of_feed_forward(model: CausalLM) -> dict[str, LoRAConfig]:
    """Return an adapter of the dense layers and shared experts of a model with experts, which PEFT reads."""
    parts = ("gate_proj", "up_proj", "down_proj")
    dense = [name for name in linear_names(model) if name.endswith(parts)]
    parameters = shortest_parameters(dense, model)
    return {"feed_forward": LoRAConfig(rank=3, target_modules=["o_proj"], target_parameters=parameters)}


def of_experts(model: CausalLM) -> dict[str, LoRAConfig]:
    """Return the adapters of a model with experts."""
    mixtures = ((name, each) for name, each in model.named_sublayers() if isinstance(each, MixtureOfExperts))
    name, mixture = next(mixtures)
    block, router = name.rpartition(".")[2], mixture.shape.router_name
    experts = [
        f"{block}.experts.{mixture.experts.input_name}",
        f"{block}.experts.down_proj",
        f"{block}.{router}.weight",
    ]
    return {
        **OF_ATTENTION,
        "experts": LoRAConfig(
            rank=3, target_modules=["o_proj"], target_parameters=experts, rank_pattern={experts[0]: 4}
        ),
        "experts_only": LoRAConfig(rank=3, target_modules=[], target_parameters=experts[1:2]),
        "saved_experts": LoRAConfig(rank=3, target_modules=["o_proj"], modules_to_save=[f"{block}.experts"]),
    }


SHARD_BYTES = 20_000
"""Size of the files of models with experts or latent attention, several per model."""

NUM_ROWS = 101
"""Rows of embedding and lm_head of the base with added tokens, whose new rows the adapter trains."""
NEW_TOKENS = tuple(range(96, NUM_ROWS))

QUANTIZED = {
    "over_nf4": QuantizationConfig(algo="nf4", double_quant=True),
    "over_int8": QuantizationConfig(algo="weight_only_int8"),
    "over_both": QuantizationConfig(algo={".*(down|o)_proj": "weight_only_int4", ".*self_attn.*": "fp4"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        vocab_size = model.config.vocab_size
        input_ids = np.random.default_rng(0).integers(0, vocab_size, (2, 24))
        export(arguments.out / "given", model, input_ids, {"all_linear": ADAPTERS["all_linear"]})
        return
    for case in CASES:
        model = CausalLM(DecoderConfig.from_dict(CASES[case]))
        set_golden_weights(model, case)
        chosen = {**EVERYWHERE, **(of_fused_layers(model) if model.config.fused_layers else {})}
        if case.startswith(("falcon_h1", "nemotron_h")):  # PEFT refuses LoRA on this layer of Mamba-2
            chosen = {"without_out_proj": LoRAConfig(rank=4, exclude_modules=["out_proj"])}
        if model.config.experts is not None:
            shape = next(filter(None, model.config.experts), None)
            chosen = {
                **(OF_ATTENTION if shape is None else of_experts(model)),
                **of_feed_forward(model),
            }
        if case in ("llama_odd_sizes", "qwen2"):
            chosen = ADAPTERS
        if model.config.experts is not None or model.config.latent is not None:
            sharded = arguments.out / case / "sharded"
            model.save_pretrained(sharded, max_shard_bytes=SHARD_BYTES)
            write_logits(sharded, model, make_inputs(case)[0])
        export(arguments.out / case, model, make_inputs(case)[0], chosen)
        if chosen is ADAPTERS:
            tables = ("embed_tokens",) if model.config.tie_word_embeddings else ("embed_tokens", "lm_head")
            added = LoRAConfig(rank=4, trainable_token_indices=dict.fromkeys(tables, NEW_TOKENS))
            input_ids = make_inputs(case)[0].copy()
            input_ids[0, : len(NEW_TOKENS)] = NEW_TOKENS
            export(arguments.out / case, model, input_ids, {"added_tokens": added}, {"vocab_size": NUM_ROWS})
        export_quantized(arguments.out / case, make_inputs(case)[0])


def export(
    folder: Path,
    model: CausalLM,
    input_ids: np.ndarray,
    adapters: dict[str, PeftConfig],
    overrides: dict[str, int] | None = None,
) -> None:
    base = (folder / "base").resolve()
    model.save_pretrained(base)
    if overrides is None:
        write_logits(base, model, input_ids)
    for name, config in adapters.items():
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, config_overrides=overrides), config)
        adapted.eval()
        paddle.seed(0)
        for key, tensor in adapted.adapter_state().items():
            if tensor.stop_gradient:
                continue  # positions
            moved = tensor + 0.1 * paddle.randn(tensor.shape)
            if key.endswith((".lora_E", ".gate")):  # closed gates leave layers of different ranks
                moved = moved * (moved > 0).astype(moved.dtype)
            tensor.set_value(moved)
        adapted.save_finished(folder / name)
        write_logits(folder / name, adapted, input_ids)
        if not config.mergeable:
            continue
        merged = folder / f"{name}_merged"
        report = merge_adapter(folder / name, merged, AutoModelForCausalLM.from_pretrained, overwrite=True)
        write_logits(merged, AutoModelForCausalLM.from_pretrained(merged), input_ids)
        print(f"{folder.name}/{name}: merged, logits differ by {report.difference:.2e}")


def export_quantized(folder: Path, input_ids: np.ndarray) -> None:
    """Write LoRA merged into quantized copies of the base, with the logits of the trained models."""
    for name, options in QUANTIZED.items():
        with tempfile.TemporaryDirectory() as adapter:
            base = (folder / "base").resolve()
            adapted = get_peft_model(
                AutoModelForCausalLM.from_pretrained(base, quantization_config=options), LoRAConfig()
            )
            adapted.eval()
            paddle.seed(0)
            for tensor in adapted.adapter_state().values():
                tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
            adapted.save_finished(adapter)
            merged = folder / f"{name}_merged"
            report = merge_adapter(adapter, merged, AutoModelForCausalLM.from_pretrained, overwrite=True)
            write_logits(merged, adapted, input_ids)
            print(f"{folder.name}/{name}: merged, logits differ by {report.difference:.2e}")


def write_logits(folder: Path, model: paddle.nn.Layer, input_ids: np.ndarray) -> None:
    with paddle.no_grad():
        np.savez(folder / "logits.npz", input_ids=input_ids, logits=model(paddle.to_tensor(input_ids)).numpy())


if __name__ == "__main__":
    main()

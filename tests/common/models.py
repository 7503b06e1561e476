"""Configurations of tiny models, and writers of tiny models with tokenizers and of a tiny dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM

QWEN3_TEMPLATE = Path(__file__).parents[1] / "golden" / "data" / "chat_templates" / "qwen3.jinja"
WORDS = ("red", "blue", "green", "white", "black", "apple", "pear", "plum", "fig", "lime")
TINY_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **TINY_SIZES,
    "tie_word_embeddings": True,
}
TINY_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "first_k_dense_replace": 2,
}
"""Differences of a tiny model with latent attention and 4 heads from other tiny models."""
TINY_LATENT_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "topk_group": 2,
}
TINY_KIMI_DELTA: dict[str, Any] = {
    **TINY_LATENT,
    "model_type": "kimi_linear",
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "linear_num_heads": 4,
    "linear_head_dim": 18,  # normalizing shorter keys amplifies rounding
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "tie_word_embeddings": False,
}
"""Differences of a tiny model with Kimi delta attention in its first layer from other tiny models."""
TINY_DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
"""Differences of a tiny model with a gated delta net in its first layer from other tiny models."""
TINY_SPLIT_DELTA: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
"""Differences of a tiny model with a gated delta net in its first layer, and a post-norm layer after it."""
TINY_MAMBA: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
}
"""Differences of a tiny model with Mamba-2 in its first layer from other tiny models."""
TINY_TWO_MIXERS: dict[str, Any] = {
    "model_type": "falcon_h1",
    "mamba_d_ssm": 24,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.6, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.9, 0.45],
}
"""Differences of a tiny model with attention and Mamba-2 in each layer from other tiny models."""
TINY_SINGLE_BLOCKS: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-",
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 6,
    "n_routed_experts": 5,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "time_step_min": 0.2,
}
"""Differences of a tiny model with one block per layer: Mamba-2, experts, attention, feed-forward."""
ODD_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
"""Sizes that are not powers of two, with three query heads per key-value head."""


def write_tiny_model(folder: Path) -> None:
    """Save the tiny Llama with a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "=", *WORDS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    AutoModelForCausalLM.from_config({**TINY_LLAMA, "eos_token_id": 2}, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tiny_data(folder: Path) -> None:
    """Write twelve rows to train.json and dev.json; each answer is the question's words in reverse."""
    folder.mkdir(exist_ok=True)
    rows = [{"src": f"{a} {b} =", "tgt": f" {b} {a}"} for a in WORDS[:4] for b in WORDS[5:8]]
    for split in ("train", "dev"):
        (folder / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_stand_ins(folder: Path) -> dict[str, str]:
    """Save models and rows that stand in for those in the documents; return what they replace: pattern -> path.

    The models have two small layers and SmolLM2's tokenizer. The stand-in for Qwen's models has Qwen3's chat template.
    The rows replace the built-in dataset of 20,000 rows.
    """
    from paddlenlp_ext import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("smollm2-135m-instruct")
    sizes = {"vocab_size": 49152, "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, **sizes}, seed=1)
    embedding = dict(model.named_parameters())["model.embed_tokens.weight"]
    with paddle.no_grad():
        embedding[tokenizer.eos_token_id] *= 50  # its logit is large after every other token: answers end soon
    for name in ("smollm2", "qwen3"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        tokenizer.chat_template = QWEN3_TEMPLATE.read_text(encoding="utf-8")
    write_tiny_data(folder / "rows")
    names = {"smollm2-135m-instruct": "smollm2", r"Qwen/[\w.-]+": "qwen3", r"\binflection\b": "rows"}
    return {pattern: str(folder / name) for pattern, name in names.items()}


def slow_decays(model: Any) -> Any:
    """Give recurrent mixers the decays of trained models, so that states last for many positions; return the model.

    Biases of their convolutions become nonzero.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.set_value(np.linspace(-4, 1.5, parameter.size, dtype=np.float32).reshape(parameter.shape))
        if name.endswith(".conv1d.bias"):
            parameter.set_value(np.linspace(-0.5, 0.5, *parameter.shape).astype(np.float32))
        if name.endswith(".dt_bias"):
            parameter.set_value(np.linspace(1, -3, *parameter.shape, dtype=np.float32))
    return model

"""Write composite_model/: tiny text models with a vision tower as transformers saves them, and their logits.

Run where `torch` and `transformers` are installed:
    python -m tests.golden.generators.make_composite_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.golden import DATA
from tests.golden.cases.model_cases import VOCAB

FOLDER = DATA / "composite_model"
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
GEMMA_4_TEXT = {
    **TEXT,
    "model_type": "gemma4_text",
    "pad_token_id": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 20,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "vocab_size_per_layer_input": VOCAB,
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def main() -> None:
    torch.manual_seed(0)
    mistral = Mistral3Config(
        text_config={**TEXT, "model_type": "ministral3", "tie_word_embeddings": True},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 4},
        tie_word_embeddings=True,
        image_token_index=7,
    )
    mistral_4 = Mistral3Config(
        text_config={
            **TEXT,
            "model_type": "mistral4",
            "num_key_value_heads": 2,
            "q_lora_rank": 14,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 6,
            "v_head_dim": 5,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 4},
        tie_word_embeddings=False,
        image_token_index=7,
    )
    gemma = Gemma3Config(
        text_config={**TEXT, "model_type": "gemma3_text", "sliding_window": 4},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=7,
    )
    gemma_4 = Gemma4Config(
        text_config=GEMMA_4_TEXT,
        vision_config={**VISION, "head_dim": 4, "num_key_value_heads": 2, "position_embedding_size": 16},
        image_token_id=7,
        video_token_id=6,
        audio_token_id=5,
    )
    qwen = Qwen3_5Config(
        text_config={
            **TEXT,
            "model_type": "qwen3_5_text",
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_heads": 2,
            "out_hidden_size": TEXT["hidden_size"],
            "patch_size": 4,
            "num_position_embeddings": 4,
        },
        image_token_id=7,
        video_token_id=6,
        vision_start_token_id=5,
        vision_end_token_id=4,
    )
    write("mistral3", Mistral3ForConditionalGeneration(mistral))
    write("gemma3", Gemma3ForConditionalGeneration(gemma))
    write("gemma4", Gemma4ForConditionalGeneration(gemma_4))
    write("qwen3_5", Qwen3_5ForConditionalGeneration(qwen))
    e_model = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
    }
    gemma_4.text_config = type(gemma_4.text_config)(**{**GEMMA_4_TEXT, **e_model})
    write("gemma4_e", Gemma4ForConditionalGeneration(gemma_4))
    write("mistral4", Mistral3ForConditionalGeneration(mistral_4))


def write(name: str, model: PreTrainedModel) -> None:
    model.eval().save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    ids = torch.from_numpy(np.random.default_rng(0).integers(8, VOCAB, (2, 15)))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    np.savez_compressed(FOLDER / name / "golden.npz", ids=ids.numpy(), logits=logits.numpy())
    print(f"{name}: logits {logits.std():.3f}")


if __name__ == "__main__":
    main()

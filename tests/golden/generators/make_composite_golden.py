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
    gemma = Gemma3Config(
        text_config={**TEXT, "model_type": "gemma3_text", "sliding_window": 4},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=7,
    )
    gemma_4 = Gemma4Config(
        text_config={
            **TEXT,
            "model_type": "gemma4_text",
            "pad_token_id": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 20,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "vocab_size_per_layer_input": VOCAB,
        },
        vision_config={**VISION, "head_dim": 4, "num_key_value_heads": 2, "position_embedding_size": 16},
        image_token_id=7,
        video_token_id=6,
        audio_token_id=5,
    )
    write("mistral3", Mistral3ForConditionalGeneration(mistral))
    write("gemma3", Gemma3ForConditionalGeneration(gemma))
    write("gemma4", Gemma4ForConditionalGeneration(gemma_4))


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

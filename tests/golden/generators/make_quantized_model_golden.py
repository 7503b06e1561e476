"""Write quantized_model/: a tiny model that transformers quantized with bitsandbytes and saved, and its logits.

Run where `torch`, `transformers`, `accelerate` and `bitsandbytes` are installed (its CPU build is enough):
    python -m tests.golden.generators.make_quantized_model_golden
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tests.golden import DATA

FOLDER = DATA / "quantized_model"
CASES = {
    "nf4_double": ("llama", "nf4", True),
    "fp4": ("llama", "fp4", False),
    "nf4_double_fused": ("phi3", "nf4", True),
}


def main() -> None:
    for name, (model_type, algo, double) in CASES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type,
            vocab_size=61,
            hidden_size=64,  # rows of full blocks: bitsandbytes 0.50.2 dequantizes other rows incorrectly on a CPU
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            tie_word_embeddings=False,
            pad_token_id=None,
        )
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        input_ids = torch.randint(0, 61, (2, 11))
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            how = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=algo,
                bnb_4bit_use_double_quant=double,
                bnb_4bit_compute_dtype=torch.float32,
            )
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
            model.train()  # in evaluation bitsandbytes multiplies in bfloat16 on CPUs that support it
            with torch.no_grad():
                logits = model(input_ids).logits
            model.save_pretrained(FOLDER / name)
            np.savez(FOLDER / name / "golden.npz", input_ids=input_ids.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()

"""Write packed_model/ and compressed_model/: tiny models of compressed-tensors, and their logits in transformers.

Run where `torch`, `transformers` and `compressed-tensors` are installed:
    python -m tests.golden.generators.make_packed_model_golden [CASE ...]
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

from tests.golden import DATA

COMPRESSORS = {
    "pack-quantized": (DATA / "packed_model", PackedQuantizationCompressor),
    "float-quantized": (DATA / "compressed_model", FloatQuantizationCompressor),
    "int-quantized": (DATA / "compressed_model", IntQuantizationCompressor),
}
"""Format -> folder of its models, and the class that writes it."""
CASES = {
    "int4_groups": ("llama", "pack-quantized", 4, True, 16),
    "int4_zero_points_fused": ("phi3", "pack-quantized", 4, False, 16),
    "int8_rows": ("qwen3", "pack-quantized", 8, True, None),
    "int8_zero_points": ("llama", "pack-quantized", 8, False, 8),
    "fp8_dynamic_fused": ("phi3", "float-quantized", 8, True, None),
    "w8a8_fused": ("phi3", "int-quantized", 8, True, None),
    "w8a8_zero_points": ("qwen3", "int-quantized", 8, False, None),
}


def main() -> None:
    for name in sys.argv[1:] or CASES:
        model_type, form, bits, symmetric, group_size = CASES[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type,
            vocab_size=61,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            initializer_range=0.2,
            tie_word_embeddings=False,
            pad_token_id=None,
        )
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = QuantizationArgs(
            num_bits=bits,
            type="float" if form == "float-quantized" else "int",
            symmetric=symmetric,
            strategy=QuantizationStrategy.GROUP if group_size else QuantizationStrategy.CHANNEL,
            group_size=group_size,
        )
        folder = COMPRESSORS[form][0] / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file(compressed(plain, weights, form), folder / "model.safetensors", {"format": "pt"})
        config.architectures = [type(plain).__name__]
        (folder / "config.json").write_text(json.dumps(described(config.to_dict(), weights, form), indent=2) + "\n")
        how = CompressedTensorsConfig(dequantize=True)  # transformers 5.23 cannot keep zero points packed
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
        input_ids = torch.randint(0, 61, (2, 11))
        with torch.no_grad():
            logits = model(input_ids).logits
        np.savez(folder / "golden.npz", input_ids=input_ids.numpy(), logits=logits.numpy())


def compressed(model: torch.nn.Module, weights: QuantizationArgs, form: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, those of its linear layers except lm_head compressed."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = tensors.pop(f"{name}.weight")
        groups = weight.reshape(len(weight), -1, weights.group_size or weight.shape[1])
        steps = 2**weights.num_bits - 1
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / steps if not weights.symmetric else groups.abs().amax(-1) * 2 / steps
        if form == "float-quantized":
            scale = groups.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
        scale = scale.half().float()
        zero = (
            (-low / scale).round().sub(2 ** (weights.num_bits - 1)).clamp(-(steps + 1) // 2, steps // 2).to(torch.int8)
        )
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": None if weights.symmetric else zero}
        for part, tensor in COMPRESSORS[form][1].compress(state, scheme).items():
            if tensor is not None:
                tensors[f"{name}.{part}"] = tensor.contiguous()
    return tensors


def described(config: dict, weights: QuantizationArgs, form: str) -> dict:
    """Return a config.json with the quantization of the linear layers."""
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}
    if form != "pack-quantized":
        inputs = QuantizationArgs(num_bits=8, type=weights.type, strategy=QuantizationStrategy.TOKEN, dynamic=True)
        group["input_activations"] = json.loads(inputs.model_dump_json())
    return {
        **config,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }


if __name__ == "__main__":
    main()

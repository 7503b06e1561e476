"""Write float8.npz and float8_model/: weights in FP8 dequantized by transformers, and a model in FP8 with its logits.

Run where `torch`, `transformers` and `accelerate` are installed:
    python -m tests.golden.generators.make_float8_golden
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_inputs

BLOCK = [4, 6]
"""Rows and columns of a block of the model; transformers loads only matrices that blocks divide."""
MODEL = {
    **CASES["deepseek_v3_experts"],
    "hidden_size": 36,
    "intermediate_size": 48,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
}
NOT_QUANTIZED = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


def main() -> None:
    golden = {}
    for name in ("float8_e4m3fn", "float8_e8m0fnu"):
        codes = torch.arange(256, dtype=torch.uint8)
        golden[name] = codes.view(getattr(torch, name)).to(torch.float32).numpy()
    generator = torch.Generator().manual_seed(0)
    for name, shape, block in (("odd", (135, 260), [128, 128]), ("small_blocks", (7, 11), [2, 3])):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        grid = [-(-size // length) for size, length in zip(shape, block, strict=True)]
        scales = torch.rand(grid, generator=generator) + 0.1
        for dtype in (torch.float32, torch.bfloat16):
            values = _dequantize_fp8_weight(weight, scales, block, torch.float32).to(dtype)
            kind = str(dtype).removeprefix("torch.")
            golden[f"{name}/{kind}"] = (values.view(torch.int16) if dtype == torch.bfloat16 else values).numpy()
        golden |= {f"{name}/codes": weight.view(torch.uint8).numpy(), f"{name}/scales": scales.numpy()}
        golden[f"{name}/block"] = np.array(block)
    np.savez_compressed(DATA / "float8.npz", **golden)
    write_model()


def write_model() -> None:
    """Write a model in FP8 under the names of DeepSeek-V3's files, and the logits that transformers computes."""
    folder = DATA / "float8_model"
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    stored = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if values.ndim != 2 or any(part in name for part in NOT_QUANTIZED):
            stored[name] = values
            continue
        rows, columns = (size // length for size, length in zip(values.shape, BLOCK, strict=True))
        blocks = values.reshape(rows, BLOCK[0], columns, BLOCK[1])
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        stored[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(values.shape)
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": BLOCK,
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    input_ids = torch.from_numpy(make_inputs("deepseek_v3_experts")[0])
    with torch.no_grad():
        logits = model(input_ids).logits
    np.savez_compressed(folder / "golden.npz", input_ids=input_ids.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()

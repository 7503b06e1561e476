"""Quantize tiny models after training and write them in the layout of compressed-tensors, each with its logits.

python -m tests.golden.peer_checks.export_packed_for_peers FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.post_training_quantization import quantize_after_training, save_packed, with_scale_dtype
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from tests.generation.tiny_models import FAMILIES, SIZES

CASES = (
    ("llama_grouped_heads", "gptq", 4, 16),
    ("gemma3_sandwich", "awq", 4, 16),
    ("qwen2_tied", "awq", 8, None),
    ("glm4_partial_interleaved", "gptq", 4, None),
)


def main() -> None:
    rng = np.random.default_rng(0)
    rows, input_ids = [rng.integers(0, 97, 24) for _ in range(6)], rng.integers(0, 97, (2, 9))
    for family, method, bits, group in CASES:
        base, folder = Path(sys.argv[1]) / f"{family}_base", Path(sys.argv[1]) / f"{family}_packed"
        folder.mkdir(parents=True)
        config = {**SIZES, **FAMILIES[family], "pad_token_id": None}
        AutoModelForCausalLM.from_config(config, seed=1).save_pretrained(base)
        layout = LAYOUTS["compressed-tensors"](bits=bits, group_size=group)
        options = PostTrainingOptions(method=method, integers=IntegerFormat(bits=bits, group_size=group))
        options = with_scale_dtype(options, layout, "float32")
        model = quantize_after_training(ModelSource.resolve(base), options, [rows])
        save_packed(model, folder, layout, "float32")
        with paddle.no_grad():
            logits = model(paddle.to_tensor(input_ids)).numpy()
        np.savez(folder / "logits.npz", input_ids=input_ids, logits=logits)


if __name__ == "__main__":
    main()

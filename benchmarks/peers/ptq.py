"""Quantize a model with llm-compressor (0.14.0 on PyTorch for the CPU): the peer of benchmarks/ptq.py.

    python -m benchmarks.peers.ptq BASE FOLDER ROWS.json METHOD GROUP_SIZE [--asymmetric]

Run in a separate environment: python -m venv ENV && ENV/bin/pip install llmcompressor
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM

MODIFIERS = {"rtn": QuantizationModifier, "gptq": GPTQModifier, "awq": AWQModifier}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("folder")
    parser.add_argument("rows", type=Path)
    parser.add_argument("method", choices=MODIFIERS)
    parser.add_argument("group_size", type=int)
    parser.add_argument("--asymmetric", action="store_true")
    arguments = parser.parse_args()
    rows = json.loads(arguments.rows.read_text())
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    weights = {"num_bits": 4, "type": "int", "symmetric": not arguments.asymmetric}
    weights |= {"strategy": "group", "group_size": arguments.group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = MODIFIERS[arguments.method](config_groups=groups, ignore=["lm_head"])
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # AWQ pins its inputs, which fails without a GPU
    model = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, rows)),
    )
    model.save_pretrained(arguments.folder, save_compressed=True)


if __name__ == "__main__":
    main()

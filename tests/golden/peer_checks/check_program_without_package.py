"""Run the programs of `export_programs.py` and print the largest difference of a logit, relative to the largest one.

Run where only paddlepaddle and numpy are installed, and their own requirements:
    python check_program_without_package.py FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from paddle import inference

ALLOWED = 1e-5
ABSENT = ("paddlenlp_ext", "transformers", "tokenizers", "torch", "paddlenlp")


def main() -> None:
    present = [name for name in ABSENT if importlib.util.find_spec(name) is not None]
    if present:
        sys.exit(f"{', '.join(present)}: installed here; use an environment with paddlepaddle and numpy only")
    worst = 0.0
    for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/expected.npz")):
        difference = largest_difference(folder)
        print(f"{folder.name}: logits differ by {difference:.2e}", flush=True)
        worst = max(worst, difference)
    sys.exit(int(not 0 < worst <= ALLOWED))


def largest_difference(folder: Path) -> float:
    """Return the largest difference over the prompts and all steps of decoding."""
    expected = np.load(folder / "expected.npz")
    described = json.loads((folder / "config.json").read_text())["static_graph"]
    program, mask = load(folder), expected["mask"]
    cache = [np.zeros([len(mask), heads, 0, size], np.float32) for heads, size in described["cache_shapes"]]
    states = [np.zeros([len(mask), *shape], np.float32) for shape, _ in described["state_shapes"]]
    differences = []
    for ids, logits in zip([expected["ids"], *expected["tokens"]], expected["logits"], strict=True):
        if differences:
            mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
        found, *new = run(program, [ids, mask, *cache, *states])
        states = new[len(cache) :]
        cache = [np.concatenate(pair, axis=2) for pair in zip(cache, new[: len(cache)], strict=True)]
        differences.append(np.abs(found - logits).max() / np.abs(logits).max())
    return max(differences)


def load(folder: Path) -> Any:
    """Load a program on the CPU."""
    config = inference.Config(str(folder / "model.json"), str(folder / "model.pdiparams"))
    config.disable_gpu()
    config.disable_mkldnn()
    config.disable_glog_info()
    return inference.create_predictor(config)


def run(program: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return copies of the program's outputs."""
    for name, array in zip(program.get_input_names(), arrays, strict=True):
        program.get_input_handle(name).copy_from_cpu(np.ascontiguousarray(array))
    program.run()
    return [program.get_output_handle(name).copy_to_cpu() for name in program.get_output_names()]


if __name__ == "__main__":
    main()

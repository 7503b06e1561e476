"""Write quant.npz: codes and scales of the weights of `quant_cases` by bitsandbytes.

Run where `torch` and `bitsandbytes` are installed (requirements-peers.txt; its CPU build is enough):
    python -m tests.golden.generators.make_quant_golden
"""

from __future__ import annotations

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional

from tests.golden import DATA
from tests.golden.cases.quant_cases import CASES, weight_of


def main() -> None:
    golden = {"dynamic_levels": functional.create_dynamic_map().numpy()}
    for algo in ("nf4", "fp4"):
        golden[f"{algo}/levels"] = functional.get_4bit_type(algo, device="cpu").numpy()
        for case, spec in CASES.items():
            weight = torch.from_numpy(weight_of(case))
            for name, double in (("single", False), ("double", True)):
                options = {"blocksize": spec["block_size"], "quant_type": algo, "compress_statistics": double}
                codes, state = functional.quantize_4bit(weight, **options)
                found = {"codes": codes.flatten(), "scales": state.absmax}
                found["dequantized"] = functional.dequantize_4bit(codes, state)
                if double:
                    found |= {"group_scales": state.state2.absmax, "offset": state.offset.reshape(1)}
                golden |= {f"{algo}/{case}/{name}/{key}": tensor.numpy() for key, tensor in found.items()}
    path = DATA / "quant.npz"
    np.savez_compressed(path, **golden)
    print(f"bitsandbytes {bitsandbytes.__version__}: {len(golden)} arrays, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()

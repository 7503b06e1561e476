"""Write loftq.npz: base and initial factors of Hugging Face PEFT's LoftQ for a weight, after one and three iterations.

Run where `torch`, `peft` and `bitsandbytes` are installed (requirements-peers.txt):
    python -m tests.golden.generators.make_loftq_golden
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peft.utils import loftq_utils

from tests.golden import DATA
from tests.golden.cases.quant_cases import LOFTQ_RANK, LOFTQ_STEPS, loftq_weight


def on_the_cpu(real: Any) -> Any:
    """Wrap a tensor method to stay on the CPU, where bitsandbytes has the same codes; PEFT's LoftQ asks for a GPU."""

    def placed(value: Any) -> Any:
        return "cpu" if str(value).startswith("cuda") else value

    return lambda tensor, *arguments, **options: real(
        tensor, *map(placed, arguments), **{name: placed(value) for name, value in options.items()}
    )


def main() -> None:
    torch.Tensor.to = on_the_cpu(torch.Tensor.to)
    loftq_utils.clear_device_cache = lambda: None
    golden = {}
    for steps in LOFTQ_STEPS:
        weight = torch.from_numpy(loftq_weight())
        base, a, b = loftq_utils.loftq_init(weight, num_bits=4, reduced_rank=LOFTQ_RANK, num_iter=steps)
        assert base.shape == weight.shape
        golden |= {f"{steps}/base": base.numpy(), f"{steps}/update": (b @ a).detach().numpy()}
    path = DATA / "loftq.npz"
    np.savez_compressed(path, **golden)
    print(f"{len(golden)} arrays, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()

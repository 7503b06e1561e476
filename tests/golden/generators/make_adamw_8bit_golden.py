"""Write adamw_8bit.npz: the dynamic map of bitsandbytes, and steps of its block-wise 8-bit AdamW.

The steps are made by bitsandbytes' PyTorch implementation of its optimizer, as the compiled one requires a GPU; the
module of that implementation imports `triton` without using it.
"""

from __future__ import annotations

import numpy as np
import torch
from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch
from bitsandbytes.functional import create_dynamic_map

from tests.golden import DATA

SHAPE, STEPS, BLOCK = (70, 61), 6, 256
SETTINGS = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}


def main() -> None:
    generator = np.random.default_rng(0)
    start = generator.standard_normal(SHAPE).astype(np.float32)
    scales = 10.0 ** generator.uniform(-4, 0, (SHAPE[0], 1))  # gives blocks different scales
    gradients = (scales * generator.standard_normal((STEPS, *SHAPE))).astype(np.float32)

    signed, unsigned = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
    parameter = torch.from_numpy(start.copy())
    moments = [torch.zeros(SHAPE, dtype=torch.uint8) for _ in range(2)]
    absmax = [torch.zeros(-(-start.size // BLOCK)) for _ in range(2)]
    trail = []
    for step, gradient in enumerate(gradients, start=1):
        optimizer_update_8bit_blockwise_pytorch(
            parameter, torch.from_numpy(gradient), *moments, SETTINGS["beta1"], SETTINGS["beta2"], 0.0, 0.0,
            SETTINGS["epsilon"], step, SETTINGS["learning_rate"], signed, unsigned, *absmax,
            SETTINGS["weight_decay"], 1.0, False, optimizer_name="adam",
        )  # fmt: skip
        trail.append(parameter.numpy().copy())
    np.savez_compressed(
        DATA / "adamw_8bit.npz",
        signed=signed.numpy(), unsigned=unsigned.numpy(), start=start, gradients=gradients, trail=np.stack(trail),
        moment1=moments[0].numpy(), moment2=moments[1].numpy(), scale1=absmax[0].numpy(), scale2=absmax[1].numpy(),
        **SETTINGS,
    )  # fmt: skip


if __name__ == "__main__":
    main()

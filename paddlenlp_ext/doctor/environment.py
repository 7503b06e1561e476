"""Describe the versions, devices and settings that determine the choice of backends."""

from __future__ import annotations

import os

import paddle

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.devices import device_count, has_gpu, model_of
from paddlenlp_ext.ops.attention import flashmask
from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.utils.environment import describe_system, processor_name

_VARIABLES = (
    "FLAGS_",
    "PADDLENLP_EXT_",
    "CUDA_VISIBLE_DEVICES",
    "CUSTOM_DEVICE_ROOT",
    "NVIDIA_TF32_OVERRIDE",
    "MKL_",
    "OMP_NUM_THREADS",
)


def describe_environment() -> list[tuple[str, str]]:
    """Return the name and value of each setting, in the order of the report."""
    return [
        *describe_system(),
        ("CUDA of Paddle", str(paddle.version.cuda())),
        ("processor", f"{processor_name()}, {threads_per_process()} cores for one process"),
        ("C++ library", library.unavailable_reason() or f"{library.loaded_path()}"),
        ("bfloat16 matmuls on the CPU", bf16.unavailable_reason() or _bf16_speed()),
        *_describe_gpus(),
        *((name, os.environ[name]) for name in sorted(os.environ) if name.startswith(_VARIABLES)),
    ]


def _bf16_speed() -> str:
    reason = bf16.conversion_reason()
    return "available" if reason is None else f"computed in float32, because {reason}"


def _describe_gpus() -> list[tuple[str, str]]:
    if not has_gpu():
        return [("GPU", "none")]
    rows = [(f"GPU {index}", str(model_of(f"gpu:{index}"))) for index in range(device_count("gpu"))]
    return [*rows, ("FlashMask", f"version {flashmask.kernel_version(128)} for heads of 128 channels")]

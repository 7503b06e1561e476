"""A pretended GPU: calls of GPU kernels can be built and checked, but not run; and a pretended autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import paddle
import pytest

from paddlenlp_ext.ops.attention import flashmask

VERSION, DETERMINISTIC = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (8, 0), deterministic: bool = False
) -> None:
    """Let Paddle report a GPU of a compute capability, with flags of its own; a CPU build lacks cuDNN's flags."""
    flags: dict[str, Any] = {VERSION: 2, DETERMINISTIC: deterministic}
    real = paddle.base.framework.get_flags

    def get_flags(names: str | Iterable[str]) -> dict[str, Any]:
        names = [names] if isinstance(names, str) else names
        return {name: flags[name] if name in flags else real([name])[name] for name in names}

    def set_flags(changed: Mapping[str, Any]) -> None:
        flags.update(changed)

    for module in (paddle, paddle.base.framework):
        monkeypatch.setattr(module, "get_flags", get_flags)
        monkeypatch.setattr(module, "set_flags", set_flags)
    monkeypatch.delenv(VERSION, raising=False)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(flashmask, "_select_version", functools.cache(flashmask._select_version.__wrapped__))
    monkeypatch.setattr(paddle.nn.quant.quantized_linear, "_get_arch_info", lambda: 10 * capability[0] + capability[1])


def pretend_autocast(monkeypatch: pytest.MonkeyPatch, dtype: str = "bfloat16") -> None:
    """Let Paddle report autocast, which it does not have without a GPU; its own operators do not cast."""
    monkeypatch.setattr(paddle, "is_autocast_enabled", lambda: True)
    monkeypatch.setattr(paddle, "get_autocast_dtype", lambda: dtype)

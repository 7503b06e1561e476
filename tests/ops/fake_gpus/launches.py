"""Launch kernels on the GPUs of libcuda.c; tests/ops/triton_utils/test_launch.py runs this in a process of its own.

Importing PyTorch fails here. Prints one JSON object: the launches of each case, and what holds after it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import paddle
from triton.runtime import driver

from paddlenlp_ext.ops.lora_linear.kernels import launch_add_low_rank
from paddlenlp_ext.ops.rms_norm.kernels import FORWARD_SIZES, launch_forward
from paddlenlp_ext.ops.triton_utils import launch as triton_launch
from paddlenlp_ext.ops.triton_utils.tile_sizes import device_capability


class NoTorch:
    """Finder that refuses to import PyTorch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)


class Launch(ctypes.Structure):
    """Record of libcuda.c."""

    _fields_ = (
        ("device", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("stream", ctypes.c_ulonglong),
        ("pointers", ctypes.c_ulonglong * 8),
        ("numbers", ctypes.c_int * 8),
    )


class Gpus:
    """The GPUs of libcuda.c, with Paddle's current stream of each."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.streams = [70, 71]
        paddle.device.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=self.streams[device])

    @property
    def num_launches(self) -> int:
        """Number of launches so far."""
        return ctypes.c_int.in_dll(self.library, "num_launches").value

    def launches_of(self, run: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the launches that a function makes."""
        records = (Launch * 64).in_dll(self.library, "launches")
        first = self.num_launches
        run()
        return [as_dict(record) for record in records[first : self.num_launches]]

    def read_parameters(self, pointers: int, numbers: int) -> None:
        """Record this many pointers and integers of each launch."""
        ctypes.c_int.in_dll(self.library, "num_pointers").value = pointers
        ctypes.c_int.in_dll(self.library, "num_numbers").value = numbers


def as_dict(record: Launch) -> dict[str, Any]:
    """Return the fields of a record."""
    values = {name: getattr(record, name) for name, _ in Launch._fields_}
    return {name: value if isinstance(value, int) else list(value) for name, value in values.items()}


class OnGpu:
    """Paddle tensor on the CPU, in the role of one on a GPU."""

    def __init__(self, tensor: paddle.Tensor, index: int) -> None:
        self.tensor, self.place = tensor, SimpleNamespace(gpu_device_id=lambda: index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def norm(x: Any, weight: Any, out: Any) -> None:
    """Launch the forward pass of rms_norm on rows that are not adjacent."""
    launch_forward(triton_launch.launch, x, x.strides[0], weight, out, 1e-6, 0.0)


def main() -> None:
    """Run the cases."""
    sys.meta_path.insert(0, NoTorch())
    gpus, cases = Gpus(), {}
    FORWARD_SIZES.fixed = {"ROWS": 32, "num_warps": 4}
    utils = triton_launch._drivers()[1].utils
    x, weight = paddle.ones([600, 2, 48], "bfloat16")[:, 0], paddle.ones([48])
    out = paddle.empty([600, 48], "bfloat16")
    gpus.read_parameters(pointers=5, numbers=3)

    # Paddle says that a tensor on the CPU is on device 0.
    utils.set_current_device(1)
    cases["other current device"] = gpus.launches_of(lambda: norm(x, weight, out))
    cases["pointers"] = [tensor.data_ptr() for tensor in (x, x, weight, out, out)]
    cases["device after"] = utils.get_current_device()

    # Other tensors with the same signature, and one that differs from them in the alignment of a pointer.
    more, unaligned = paddle.ones([616, 2, 48], "bfloat16")[:, 0], paddle.ones([49])[1:]
    for case, own_x, own_weight in (("other rows", more, weight), ("unaligned", x, unaligned)):
        cases[case] = gpus.launches_of(lambda own_x=own_x, own_weight=own_weight: norm(own_x, own_weight, out))
        cases[f"pointers, {case}"] = [tensor.data_ptr() for tensor in (own_x, own_x, own_weight, out, out)]
        cases[f"kernels after {case}"] = len(triton_launch._COMPILED)

    utils.set_current_device(0)
    second = OnGpu(x, 1)
    cases["second GPU"] = gpus.launches_of(lambda: norm(second, weight, out))
    # Tables of 9.0 and 8.0 have different sizes for this kernel. The current GPU is the other one.
    y, inner, factor = (paddle.ones(shape, "bfloat16") for shape in ([600, 256], [600, 16], [256, 16]))
    for device in (0, 1):
        own = OnGpu(y, device)
        utils.set_current_device(1 - device)
        cases[f"capability {device}"] = device_capability(own)
        cases[f"sizes {device}"] = gpus.launches_of(
            lambda own=own: launch_add_low_rank(triton_launch.launch, own, inner, factor, 1.0, (1, 16))
        )
    utils.set_current_device(0)
    gpus.streams[1] = 81
    cases["other stream"] = gpus.launches_of(lambda: norm(second, weight, out))
    thread = threading.Thread(target=norm, args=(second, weight, out))
    cases["thread"] = gpus.launches_of(lambda: (thread.start(), thread.join()))

    try:
        norm(second, paddle.ones([48], "complex64"), out)
    except Exception as error:
        cases["error"] = type(error).__name__
    cases["device after the error"] = utils.get_current_device()
    cases["Triton's own stream"] = driver.active.get_current_stream(1)

    # PyTorch for CPUs, with which Triton's own driver does not start.
    driver.set_active(None)
    torch = sys.modules["torch"] = ModuleType("torch")
    torch.Tensor, torch.cuda = type("Tensor", (), {}), SimpleNamespace(is_available=lambda: False)
    cases["PyTorch for CPUs"] = gpus.launches_of(lambda: norm(second, weight, out))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()

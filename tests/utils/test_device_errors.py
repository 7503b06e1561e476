"""Errors of devices: the messages of Paddle become a cause and a remedy."""

from __future__ import annotations

import pytest

from paddlenlp_ext.utils.device_errors import explain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "(ResourceExhausted) \n\nOut of memory error on GPU 0. Cannot allocate 1.5GB memory on "
            "GPU 0, 78.0GB memory has been allocated and available memory is only 1.0GB.",
            "out of memory on GPU 0: no 1.5GB; use less memory",
        ),
        (
            "(External)  CustomDevice error, the error code is : 2.  (at custom_device.cc:387)",
            "device is out of memory",
        ),
        (
            "(InvalidArgument) Fail to open library: /x/libpaddle-npu.so with error: libascendcl.so: cannot open "
            "shared object file\n  [Hint: dso_handle should not be null.] (at init.cc:150)",
            "plug-in /x/libpaddle-npu.so: libascendcl.so: cannot open shared object file; install the missing driver",
        ),
        (
            "The kernel with key (npu, Undefined(AnyLayout), float32) of kernel `contiguous` is not registered.",
            "no kernel contiguous in float32 for the device npu; set the environment variable FLAGS_use",
        ),
    ],
)
def test_errors_of_devices_are_explained(text, words):
    assert words in str(explain(RuntimeError(text)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CustomDevice error, the error code is : 3.",
        "(InvalidArgument) out of memory",
        "The kernel with key (CPU, Undefined(AnyLayout), bfloat16) of kernel `cumprod` is not registered.",
        "The kernel with key (GPU, Undefined(AnyLayout), int8) of kernel `cumprod` is not registered.",
    ],
)
def test_other_errors_are_not_explained(text):
    assert explain(RuntimeError(text)) is None

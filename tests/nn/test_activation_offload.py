"""Tensors in temporary files: values, removal of the files, and errors; and the calls of the GPU's path."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn import activation_offload as module
from paddlenlp_ext.nn.activation_offload import file_system, offload
from paddlenlp_ext.nn.recompute import RecomputePlan
from tests.common.arrays import normal
from tests.common.models import TINY_LLAMA
from tests.common.scripts import script_environment

IDS = [[1, 2, 3, 4]]


def offloading_model():
    model = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)
    model.enable_recompute(RecomputePlan(offloads_inputs=True))
    model.train()
    return model


def open_files(folder) -> int:
    """Return the number of open files of this process in a folder, with or without a name."""
    gc.collect()
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return sum(target.startswith(str(folder)) for target in targets)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [[1], [2, 3, 5], [300, 301]])
@pytest.mark.parametrize("stop_gradient", [True, False])
def test_offload_returns_the_same_tensor_twice(folder, dtype, shape, stop_gradient):
    x = paddle.to_tensor(normal(1, *shape)).astype(dtype)
    x.stop_gradient = stop_gradient
    saved = offload(x)
    for _ in range(2):
        loaded = saved.load()
        assert (loaded.dtype, loaded.stop_gradient, loaded.shape) == (x.dtype, stop_gradient, x.shape)
        np.testing.assert_array_equal(loaded.numpy(), x.numpy())


@pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")
def test_offloaded_files_have_no_name_and_are_closed_after_the_backward_pass(folder):
    loss = offloading_model()(paddle.to_tensor(IDS)).sum()
    assert (os.listdir(folder), open_files(folder)) == ([], TINY_LLAMA["num_hidden_layers"])
    loss.backward()
    del loss
    assert open_files(folder) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")
def test_offloaded_files_are_closed_after_an_error(folder):
    model = offloading_model()

    def fail(layer, inputs):
        raise RuntimeError("the last layer fails")

    def run() -> None:  # its end frees the traceback, which refers to the tensors
        with pytest.raises(RuntimeError, match="the last layer fails"):
            model(paddle.to_tensor(IDS))

    model.model.layers[-1].register_forward_pre_hook(fail)
    run()
    assert (os.listdir(folder), open_files(folder)) == ([], 0)


def test_offload_leaves_no_file_behind_a_killed_process(tmp_path):
    code = """
import os, signal, sys, paddle
from paddlenlp_ext.nn.activation_offload import offload
saved = [offload(paddle.ones([1000])) for _ in range(3)]
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = script_environment(TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full stands in for a full disk")
def test_offload_on_a_full_disk_names_folder_and_remedy(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(ValueError, match=rf"cannot write .* MB to {folder} \(No space left.*set TMPDIR"):
        offloading_model()(paddle.to_tensor(IDS))


@pytest.mark.parametrize(("system", "level"), [("tmpfs", "WARNING"), ("ext4", "INFO"), (None, "INFO")])
def test_offload_to_a_folder_in_memory_is_a_warning(folder, monkeypatch, caplog, system, level):
    monkeypatch.setattr(module, "file_system", lambda folder: system)
    module._describe_folder.cache_clear()
    for _ in range(2):
        offload(paddle.ones([2]))
    assert [record.levelname for record in caplog.records] == [level]
    assert str(folder) in caplog.text and "TMPDIR" in caplog.text


@pytest.mark.skipif(not os.path.exists("/proc/mounts"), reason="there is no list of mounts")
def test_file_system_is_that_of_the_nearest_mount():
    assert file_system("/proc/self") == "proc"
    assert file_system("/dev/shm/missing/folder") in ("tmpfs", "devtmpfs", None, file_system("/dev"))


def test_offload_on_a_gpu_pins_the_detached_tensor_and_copies_it_back():
    """Check the calls only: which operator is called on which tensor."""
    on_gpu = SimpleNamespace(stop_gradient=True)
    place = SimpleNamespace(is_gpu_place=lambda: True)
    pinned = SimpleNamespace(to=lambda target, blocking=False: on_gpu if target is place and blocking else None)
    detached = SimpleNamespace(pin_memory=lambda: pinned)
    saved = offload(SimpleNamespace(place=place, detach=lambda: detached, stop_gradient=False))
    assert saved.load() is on_gpu and on_gpu.stop_gradient is False

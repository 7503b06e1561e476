"""Wheels contain every tracked file of the package, and the shipped configurations."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from paddlenlp_ext.ops.cpp import build as cpp_build
from paddlenlp_ext.ops.cpp import levels
from paddlenlp_ext.utils.shipped_configs import shipped_configs_folder
from tests.common.scripts import ROOT

setuptools = pytest.importorskip("setuptools")


def tracked_files(*paths: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {path for path in listed.stdout.split() if not path.endswith(".clang-format")}


def files_in_wheel(paths: set[str]) -> set[str]:
    """Return the paths in a wheel of files of the repository."""
    return {path.replace("llm/config/", "paddlenlp_ext/shipped_configs/") for path in paths}


def test_wheel_has_all_tracked_files_and_the_shipped_configs(monkeypatch):
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    build = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    build.ensure_finalized()
    built = {os.path.relpath(path, build.build_lib) for path in build.get_outputs(include_bytecode=False)}
    expected = files_in_wheel(tracked_files("paddlenlp_ext", "llm/config"))
    assert len(expected) > 500
    assert expected <= built, f"setup.py leaves out: {sorted(expected - built)}"


def test_shipped_configs_folder_has_the_files_of_llm_config():
    assert shipped_configs_folder() == ROOT / "llm/config"
    assert list(shipped_configs_folder().glob("smollm2/*.json"))


@pytest.mark.layouts
@pytest.mark.skipif(importlib.util.find_spec("setuptools_scm") is None, reason="setuptools-scm is not installed")
def test_sdist_gives_the_same_wheel_as_the_checkout(tmp_path: Path):
    for path in tracked_files():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_bytes((ROOT / path).read_bytes())

    def build(kind: str, tree: Path) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(tmp_path)!r}))"
        environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PADDLENLP_EXT": "1.2.3"}
        if kind == "wheel" and tree.name != "tree":
            del environment["SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PADDLENLP_EXT"]  # an sdist knows its version
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return tmp_path / done.stdout.split()[-1]

    subprocess.run("git init -q && git add -A", cwd=tmp_path / "tree", shell=True, check=True)
    wheel = build("wheel", tmp_path / "tree")
    names = set(zipfile.ZipFile(wheel).namelist())
    wheel.unlink()
    with tarfile.open(build("sdist", tmp_path / "tree")) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / "paddlenlp_ext-1.2.3")
    assert again.name == "paddlenlp_ext-1.2.3-py3-none-any.whl"
    assert set(zipfile.ZipFile(again).namelist()) == names
    assert files_in_wheel(tracked_files("paddlenlp_ext", "llm/config")) <= names
    assert b"pnx = paddlenlp_ext.commands.pnx:main" in zipfile.ZipFile(again).read(
        "paddlenlp_ext-1.2.3.dist-info/entry_points.txt"
    )


PRODUCT_IN_CPP = """
import numpy as np, paddle
import paddlenlp_ext
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.linear import linear_op
x, weight = paddle.randn([70, 129]), paddle.randn([65, 129])
y = linear_op.choose(x, "cpp")(x, weight, None)
np.testing.assert_allclose(y.numpy(), x.numpy() @ weight.numpy().T, rtol=1e-4, atol=1e-4)
print(paddlenlp_ext.__file__, library.loaded_path())
"""


@pytest.mark.layouts
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_wheel_with_compiled_libraries_computes_without_a_compiler(tmp_path: Path):
    for path in tracked_files():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_bytes((ROOT / path).read_bytes())
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    version = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PADDLENLP_EXT": "1.2.3"}
    environment = {**os.environ, **version, "PADDLENLP_EXT_PREBUILD": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "tree", env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("paddlenlp_ext-1.2.3-py3-none-linux_")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    settings = {"PYTHONPATH": str(tmp_path / "installed"), "CXX": "/no/such/compiler"}
    usable = [level for level in levels.LEVELS if level.required <= cpp_build.cpu_flags()]
    for level in usable:
        chosen = {**os.environ, **settings, "XDG_CACHE_HOME": str(tmp_path), "PADDLENLP_EXT_LEVEL": level.name}
        if level == usable[0]:
            del chosen["PADDLENLP_EXT_LEVEL"]
        command = [sys.executable, "-W", "ignore", "-c", PRODUCT_IN_CPP]
        done = subprocess.run(command, cwd=tmp_path, env=chosen, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        package, loaded = done.stdout.split()[-2:]
        assert package.startswith(str(tmp_path / "installed")) and loaded.endswith(f"-{level.name}.so")
        assert Path(loaded).is_relative_to(tmp_path / "installed")
        assert str(ROOT).encode() not in Path(loaded).read_bytes()

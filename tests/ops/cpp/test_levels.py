"""Instruction sets of the libraries in a wheel: choice by processor, and names that depend on the sources."""

from __future__ import annotations

import logging

import pytest

from paddlenlp_ext.ops.cpp import build, levels, library
from tests.common.marks import needs_cpp

AVX2 = "fpu sse4_2 avx f16c movbe abm bmi1 bmi2 avx2 fma"
AVX512 = AVX2 + " avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSORS = {
    "Core 2 Duo": ("fpu sse sse2 ssse3 sse4_1", "portable"),
    "Sandy Bridge": ("fpu sse4_2 avx", "portable"),
    "Piledriver, which has FMA but not AVX2": ("fpu sse4_2 avx f16c abm bmi1 fma", "portable"),
    "Haswell, Zen 2": (AVX2, "avx2"),
    "Alder Lake": (AVX2 + " avx_vnni", "avx2-vnni"),
    "Knights Landing, which has AVX-512 in part": (AVX2 + " avx512f avx512cd avx512er avx512pf", "avx2"),
    "Skylake-X": (AVX512, "avx512"),
    "Ice Lake": (AVX512 + " avx512_vnni avx512_vbmi2", "avx512-vnni"),
    "Cooper Lake, Zen 4": (AVX512 + " avx512_vnni avx512_bf16", "avx512-bf16"),
    "Zen 5": (AVX512 + " avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16"),
    "Sapphire Rapids": (AVX512 + " avx512_vnni avx512_bf16 avx_vnni amx_bf16 amx_tile amx_int8", "amx"),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_best_level_for_a_processor_uses_only_its_instructions(processor):
    flags, expected = PROCESSORS[processor]
    assert levels.best_level(set(flags.split())).name == expected


def test_prebuilt_library_is_named_after_the_sources(monkeypatch, tmp_path):
    (tmp_path / "op.cpp").write_text("int one;")
    monkeypatch.setattr(levels, "SOURCES", tmp_path)
    first = levels.prebuilt_library(levels.LEVELS[0], tmp_path)
    (tmp_path / "op.cpp").write_text("int two;")
    assert levels.prebuilt_library(levels.LEVELS[0], tmp_path) != first


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Return the folder of compiled libraries of an installed wheel for a processor with AVX2; it is empty."""
    monkeypatch.delenv("PADDLENLP_EXT_LEVEL", raising=False)
    monkeypatch.delenv("PADDLENLP_EXT_SANITIZE", raising=False)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(AVX2.split()))
    return tmp_path


def test_find_prebuilt_returns_the_library_of_the_level(wheel, monkeypatch):
    for level in levels.LEVELS[-2:]:
        levels.prebuilt_library(level, wheel).touch()
    assert build.find_prebuilt().name.endswith("-avx2.so")
    monkeypatch.setenv("PADDLENLP_EXT_LEVEL", "portable")
    assert build.find_prebuilt().name.endswith("-portable.so")
    monkeypatch.setenv("PADDLENLP_EXT_LEVEL", "native")
    assert build.find_prebuilt() is None


def test_find_prebuilt_ignores_libraries_of_other_sources(wheel):
    (wheel / "native-0123456789abcdef-avx2.so").touch()
    assert build.find_prebuilt() is None


def test_find_prebuilt_with_an_unknown_level_names_the_levels(wheel, monkeypatch):
    monkeypatch.setenv("PADDLENLP_EXT_LEVEL", "avx3")
    with pytest.raises(build.BuildError, match=r"PADDLENLP_EXT_LEVEL=avx3 is not one of native, amx, .*portable"):
        build.find_prebuilt()


@needs_cpp
def test_library_of_the_wheel_that_cannot_be_loaded_is_built_here(wheel, monkeypatch, caplog):
    levels.prebuilt_library(levels.best_level(build.cpu_flags()), wheel).write_text("not a library")
    library._load.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "paddlenlp_ext"):
            assert library.unavailable_reason() is None
        assert library.loaded_path().parent != wheel and "cannot be loaded; building it here" in caplog.text
    finally:
        library._load.cache_clear()

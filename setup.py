"""Packages of the wheel; pyproject.toml has the metadata, and constraints.txt pins the versions of all dependencies.

With PADDLENLP_EXT_PREBUILD=1, the wheel contains compiled C++ libraries and is specific to one platform
(docs/releasing.md).
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("PADDLENLP_EXT_PREBUILD") == "1"


class BuildWithLibraries(build_py):
    """Copy the package, and compile the libraries into the copy; a development installation builds on first use."""

    def run(self) -> None:
        super().run()
        if PREBUILD and not self.editable_mode:
            spec = importlib.util.spec_from_file_location("levels", "paddlenlp_ext/ops/cpp/levels.py")
            levels = sys.modules["levels"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(levels)
            levels.compile_all(Path(self.build_lib, "paddlenlp_ext/ops/cpp/prebuilt"))


class PlatformWheel(bdist_wheel):
    """Tag a wheel with libraries for one platform and for every Python 3, because ctypes loads the libraries."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """Distribution whose files belong to one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=[*find_packages(include=["paddlenlp_ext", "paddlenlp_ext.*"]), "paddlenlp_ext.shipped_configs"],
    # A second copy of llm/config would diverge. paddlenlp_ext/utils/shipped_configs.py finds the folder.
    package_dir={"paddlenlp_ext.shipped_configs": "llm/config"},
    package_data={
        "paddlenlp_ext": ["py.typed", "**/*.json", "**/*.css", "**/*.html", "**/*.js", "**/*.cpp", "**/*.h"],
        "paddlenlp_ext.shipped_configs": ["*/*.json"],
    },
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution if PREBUILD else Distribution,
)

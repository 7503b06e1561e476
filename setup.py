"""Packages of the wheel; pyproject.toml has the metadata, and constraints.txt pins the versions of all dependencies."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["paddlenlp_ext", "paddlenlp_ext.*"]), "paddlenlp_ext.shipped_configs"],
    # A second copy of llm/config would diverge. paddlenlp_ext/utils/shipped_configs.py finds the folder.
    package_dir={"paddlenlp_ext.shipped_configs": "llm/config"},
    package_data={
        "paddlenlp_ext": ["py.typed", "**/*.json", "**/*.css", "**/*.html", "**/*.js", "**/*.cpp", "**/*.h"],
        "paddlenlp_ext.shipped_configs": ["*/*.json"],
    },
)

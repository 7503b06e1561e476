"""Packaging; constraints.txt pins the versions of all dependencies."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
TRITON = "triton >=3.8 ; platform_system == 'Linux'"  # older releases launch with PyTorch only

setup(
    name="paddlenlp-ext",
    version="0.1.0",
    description="Fine-tuning for PaddlePaddle: every documented method, on a laptop's CPU too",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)],
    python_requires=">=3.10",
    packages=find_packages(include=["paddlenlp_ext", "paddlenlp_ext.*"]),
    package_data={"paddlenlp_ext": ["py.typed", "**/*.json", "**/*.css", "ops/csrc/*"]},
    # paddlepaddle is not listed here: GPU users install paddlepaddle-gpu from Paddle's own index first.
    install_requires=[
        "numpy",
        "safetensors",
        "transformers",
        "jinja2",
        "sentencepiece",
        "rich",
        "matplotlib",
    ],
    extras_require={
        "cpu": ["paddlepaddle"],
        "quickstart": ["gguf", "lemminflect", "sacrebleu", "rouge-score"],
        "metrics": ["sacrebleu", "rouge-score"],
        "gguf": ["gguf"],
        "structured": ["llguidance"],
        "serve": ["starlette", "uvicorn", "llguidance"],
        "hub": ["datasets"],
        # Installed without constraints.txt: lm-eval's table writer needs an older python-dateutil.
        "lm-eval": ["lm-eval"],
        "parquet": ["pyarrow"],
        "zstd": ["zstandard"],
        "visualdl": ["visualdl"],
        "triton": [TRITON],
        # Triton's interpreter runs the GPU kernels' tests on a CPU.
        "dev": [
            *("pytest", "pytest-cov", "pytest-xdist", "ruff", "codespell", "pyrefly", "clang-format", "pre-commit"),
            *("pyarrow", "zstandard", "starlette", "uvicorn", "llguidance", "jsonschema", TRITON),
        ],
    },
)

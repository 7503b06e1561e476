"""Small training run, in one or several processes, that counts the bytes sent by collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.trainer.train_step import OptimizerStep
from paddlenlp_ext.utils.distributed_env import rank

_LEAST = 256
"""Largest size, in bytes, of a control value: a count, a norm or a flag."""


class Counting:
    """Counter of the bytes that ring collectives would send inside a `with` block, by axis."""

    def __init__(self, mesh: Mesh) -> None:
        self.sent: Counter[str] = Counter()
        self._axes = {mesh.tensor.ranks: "tensor", mesh.pipeline.ranks: "pipeline", mesh.replicas.ranks: "replicas"}
        self._axes |= {mesh.sharding.ranks: "replicas"} | ({mesh.data.ranks: "replicas"} if mesh.data.size > 1 else {})
        self._axes |= {tuple(pair.ranks): "pipeline" for pair in mesh.pipeline.pairs.values()}

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Count bytes inside the `with` block."""
        originals = {name: getattr(dist, name) for name in _SHARES}
        for name, original in originals.items():
            setattr(dist, name, self._counted(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        index, share = _SHARES[name]

        def call(*arguments: Any, group: Any, **options: Any) -> Any:
            tensor = arguments[index]
            size = tensor.size * tensor.element_size()
            if size > _LEAST:
                self.sent[self._axes[tuple(group.ranks)]] += size * share(group.nranks)
            return original(*arguments, group=group, **options)

        return call


# operation -> index of the counted argument, and bytes sent by a ring of g ranks, relative to the bytes of the argument
_SHARES: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_reduce": (0, lambda g: 2 * (g - 1) / g),
    "all_gather": (1, lambda g: g - 1),  # the counted argument is this rank's shard
    "reduce_scatter": (1, lambda g: (g - 1) / g),
    "broadcast": (0, lambda g: (g - 1) / g),
    "reduce": (0, lambda g: (g - 1) / g),
    "send": (0, lambda g: 1.0),
}


class _Rows:
    """Documents of one length, in which every token except the first is a target token."""

    def __init__(self, number: int, length: int, vocabulary: int) -> None:
        tokens = np.random.default_rng(0).integers(1, vocabulary, (number, length)).astype(np.int32)
        loss_mask = np.arange(length) > 0
        self.rows = [EncodedRow(row, loss_mask, index) for index, row in enumerate(tokens)]
        self.lengths = np.full(number, length, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EncodedRow:
        return self.rows[index]


def train_and_count(shape: dict[str, Any], folder: Path, keys: dict[str, Any], length: int) -> dict[str, Any]:
    """Train; return the bytes sent in the last step by axis, this process's memory growth, and its stage."""
    config = _config(shape, folder, {**keys, "max_length": length})
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2, save_pretrained=lambda folder: None)
    rows = _Rows(64, length, shape["vocab_size"])
    source = ModelSource.from_config(config.model)
    data = RunData(source, tokenizer, SimpleNamespace(stop_token_ids=()), rows, None)
    paddle.zeros([1])
    before = _status("VmRSS")
    trainer = build_trainer(config, data)
    mesh = getattr(trainer.process_group, "mesh", Mesh())
    counting, run = Counting(mesh), OptimizerStep.run

    def counted(step: OptimizerStep, *arguments: Any) -> Any:
        counting.sent.clear()
        with counting.switched_on():
            return run(step, *arguments)

    OptimizerStep.run = counted
    trainer.train()
    grown = _status("VmHWM") - before
    return {"rank": rank(), "stage": mesh.pipeline.index, "sent": dict(counting.sent), "grown": grown}


def _config(shape: dict[str, Any], folder: Path, keys: dict[str, Any]) -> Any:
    """Write this rank's copy of the model, and return the run's configuration."""
    model = folder / f"model-{rank()}"
    AutoModelForCausalLM.from_config(shape, seed=0).save_pretrained(model)
    values = {
        "model_name_or_path": str(model),
        "dataset_name_or_path": "none",
        "output_dir": str(folder / "out"),
        "do_train": True,
        "device": "cpu",
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
        "src_length": 8,
        "disable_tqdm": True,
        **keys,
    }
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return load_run_config(words, peft_methods())


def _status(name: str) -> int:
    """Return the value of the field `name` of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

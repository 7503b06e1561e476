"""Worker of every launched process: runs shipped configurations on tiny weights in sequence, one step each.

Writes FOLDER/outcomes-RANK.json: job name -> {"losses": [...]}, or {"refused": error message}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.parallel_degrees import complete_degrees
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks import loss_plot
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.utils.distributed_env import rank, world_size
from tests.common.training import Rows, Tokenizer

FOLDER = Path(sys.argv[1])
meshes, make_mesh = {}, Mesh.from_config


def mesh_of(parallel) -> Mesh:
    """Return one mesh per layout, as a process cannot create the groups of dozens of meshes."""
    key = (complete_degrees(parallel, world_size()), parallel.hybrid_parallel_topo_order)
    if key not in meshes:
        meshes[key] = make_mesh(parallel)
    return meshes[key]


def outcome_of(words: list[str]) -> dict[str, Any]:
    """Train and save one run; return its result."""
    rows = (Rows(12, seed=3), Rows(5, seed=4))
    try:
        config = load_run_config(words, peft_methods())
        source = ModelSource.from_config(config.model)
        trainer = build_trainer(config, RunData(source, Tokenizer(), SimpleNamespace(stop_token_ids=()), *rows))
    except ValueError as error:
        return {"refused": str(error)}
    trainer.train()
    trainer.save_model()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


Mesh.from_config = mesh_of
loss_plot.plot_loss = lambda log_history, path: None  # drawing takes as long as the rest of such a run
outcomes = {name: outcome_of(words) for name, words in json.loads((FOLDER / "jobs.json").read_text()).items()}
(FOLDER / f"outcomes-{rank()}.json").write_text(json.dumps(outcomes))

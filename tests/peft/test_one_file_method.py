"""Adapter method in one new file: it has JSON keys, trains, is saved and loaded, without any other change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.common.adapters import run_keys
from tests.common.scripts import ROOT

METHOD = '''
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import paddle

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import LinearAdapter
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import linear_names, select_targets


@PEFT_METHODS.register("toy_rows")
@dataclass(kw_only=True)
class ToyRowsConfig(PeftConfig):
    """Add a trainable number to every weight of a row."""

    peft_type: ClassVar[str] = "TOY_ROWS"

    gain: float = option(1.0, help="Scale of the update.", above=0)

    def targets(self, model):
        return select_targets(linear_names(model), ["down_proj"], "toy_rows_target_modules")

    def wrap(self, name, base, seed):
        return ToyRows(base, self.gain)

    def warm_start(self, stored):
        return replace(stored, path=self.path)

    def to_adapter_config(self, model):
        return {"gain": self.gain}

    @classmethod
    def from_adapter_config(cls, fields):
        refuse_unread_fields(fields, {"gain"})
        return cls(gain=fields["gain"])


class ToyRows(LinearAdapter):
    def __init__(self, base, gain):
        super().__init__(base)
        self.gain = gain
        self.rows = self.new_parameter(np.zeros((base.out_features, 1), np.float32))

    def adapter_forward(self, x):
        return self.base(x) + paddle.matmul(x.sum(axis=-1, keepdim=True), self.rows, transpose_y=True) * self.gain

    def delta_weight(self):
        return self.rows.astype("float32").expand([-1, self.in_features]) * self.gain

    def sharding_axes(self, style):
        return {"rows": 0 if style == "colwise" else None}
'''

LAUNCHER = """
import runpy, sys
import paddlenlp_ext.peft.methods
paddlenlp_ext.peft.methods.__path__.append(sys.argv[1])
script, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""

LOADER = """
import sys
import paddlenlp_ext.peft.methods
paddlenlp_ext.peft.methods.__path__.append(sys.argv[1])
import numpy as np
import paddle
from paddlenlp_ext import AutoModelForCausalLM, PeftModel

ids = paddle.to_tensor([[5, 10, 4, 10, 5]])
base = AutoModelForCausalLM.from_pretrained(sys.argv[2])
base.eval()
before = base(ids).numpy()
model = PeftModel.from_pretrained(base, sys.argv[3])
after = model(ids).numpy()
assert np.abs(after - before).max() > 1e-4, "the adapter changes nothing"
assert type(model.peft_config).__name__ == "ToyRowsConfig" and model.peft_config.gain == 2.0
np.testing.assert_allclose(model.merge_and_unload()(ids).numpy(), after, atol=1e-5)
print("loaded")
"""


def run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_method_in_one_new_file_has_keys_trains_saves_loads_and_merges(run_folders: Path, tmp_path: Path):
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "toy_rows.py").write_text(METHOD)
    training = {"max_length": 64, "src_length": 32, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    keys = run_keys(run_folders, toy_rows=True, toy_rows_gain=2.0, **training)
    (tmp_path / "run.json").write_text(json.dumps(keys))
    run("-c", LAUNCHER, plugins, ROOT / "llm" / "run_finetune.py", tmp_path / "run.json")
    written = json.loads((run_folders / "out" / "adapter_config.json").read_text())
    assert (written["peft_type"], written["gain"]) == ("TOY_ROWS", 2.0)
    assert run("-c", LOADER, plugins, run_folders / "model", run_folders / "out").strip().endswith("loaded")

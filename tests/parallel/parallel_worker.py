"""Worker of every launched process: runs the cases of FOLDER/cases.json in sequence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.trainer.callbacks import loss_plot
from tests.common.parallel import Case, run_case

loss_plot.plot_loss = lambda log_history, path: None  # drawing takes as long as the rest of such a run
FOLDER = Path(sys.argv[1])
for fields in json.loads((FOLDER / "cases.json").read_text()):
    run_case(Case(**fields), FOLDER)

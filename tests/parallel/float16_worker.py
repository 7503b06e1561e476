"""Worker of test_loss_scale_layouts.py: runs the cases of FOLDER/cases.json with a loss scale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.trainer import trainer
from tests.common.float16 import OverflowingGradients
from tests.common.parallel import Case, run_case

setattr(PrecisionConfig, "scales_loss", True)  # noqa: B010 (a value in place of a property)
setattr(trainer, "build_objective", lambda config, *others: OverflowingGradients(config))  # noqa: B010
FOLDER = Path(sys.argv[1])
for fields in json.loads((FOLDER / "cases.json").read_text()):
    run_case(Case(**fields), FOLDER)

"""What every launched process runs: the cases of FOLDER/cases.json, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]

from parallel_cases import Case, run_case

FOLDER = Path(sys.argv[1])
for fields in json.loads((FOLDER / "cases.json").read_text()):
    run_case(Case(**fields), FOLDER)

"""The tests here use the training room's tiny model and rows, in this process and in those that are launched."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train"))

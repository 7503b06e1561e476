"""Measurements of speed, memory and accuracy: `python -m benchmarks.NAME` from the root of the repository.

Modules of `benchmarks.peers` run in environments without paddlenlp_ext, so this module does not import it.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STARTED_WITH = dict(os.environ)
"""Environment variables at the start, for other programs. `import paddlenlp_ext` sets threads and MKL's code path."""

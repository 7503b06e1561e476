"""Golden files (`data/`), the scripts that write them (`generators/`) and the inputs that both sides share (`cases/`).

The scripts run in an environment without paddlenlp_ext, so neither they nor the cases import it.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"

"""Worker process of parallel_layout_checks.py: train in each layout and write FOLDER/results.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paddlenlp_ext._runtime import configure_runtime


def main(folder: Path, device: str) -> None:
    """Train in each layout; rank 0 writes the losses and gradient norms to FOLDER/results.json."""
    from paddlenlp_ext.doctor.devices_and_dtypes import Target
    from paddlenlp_ext.doctor.parallel_layout_checks import LAYOUTS
    from paddlenlp_ext.doctor.tiny_run import precision_keys, run_training
    from paddlenlp_ext.utils.distributed_env import is_main_rank

    precision = precision_keys(Target(device, "float32"))
    results = {
        name: run_training({**layout.keys, **precision}, output_dir=folder / name) for name, layout in LAYOUTS.items()
    }
    if is_main_rank():
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    configure_runtime()  # before Paddle is imported
    main(Path(sys.argv[1]), sys.argv[2])

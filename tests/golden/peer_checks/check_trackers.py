"""Send a run to one tracker, and read it with the tracker's own library: check_trackers.py TRACKER FOLDER.

Each tracker has an environment of its own, `.venv-trackers/NAME`, with the package and the extra `cpu` (`make
check-trackers`).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from paddlenlp_ext.config.trackers import TRACKER_MODULES
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import Rows, Tokenizer, make_config, make_model

LOCAL = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
METRICS = ("train/loss", "train/learning_rate", "eval/loss")
Read = Callable[[Path], dict[str, dict[int, float]]]
"""Function that reads a folder with a run: metric -> step -> value."""


def read_visualdl(folder: Path) -> dict[str, dict[int, float]]:
    from visualdl import LogReader

    (file,) = (folder / "runs").glob("vdlrecords*")
    reader = LogReader(file_path=str(file))
    return {name: {point.id: point.value for point in reader.get_data("scalar", name)} for name in METRICS}


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in METRICS}


def read_mlflow(folder: Path) -> dict[str, dict[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paddlenlp_ext")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "checked" and run.data.params["max_steps"] == "4"
    return {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in METRICS
    }


def read_wandb(folder: Path) -> dict[str, dict[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    for data in log_records(file.read_bytes()):
        record = Record.FromString(data)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if name in found:
                found[name][record.history.step.num] = json.loads(item.value_json)
        assert not record.HasField("exit") or record.exit.exit_code == 0
    return found


def log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: a header of 7 bytes, and blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only or the last part of a record
            yield parts
            parts = b""


def read_swanlab(folder: Path) -> dict[str, dict[int, float]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = (folder / "swanlog").glob("run-*/*.swanlab")
    reader, found = DataStoreReader(), {name: {} for name in METRICS}
    reader.open(file)
    for data in reader:
        record = Record.FromString(data)
        if record.HasField("scalar") and record.scalar.key in found:
            found[record.scalar.key][record.scalar.step] = record.scalar.value.number
    return found


READERS: dict[str, Read] = {
    "visualdl": read_visualdl,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
    "mlflow": read_mlflow,
}


def main(tracker: str, folder: Path) -> None:
    """Train a tiny model with the tracker, and compare what the tracker has with metrics.jsonl.

    Raises:
        AssertionError: a value differs.
    """
    os.environ.update(LOCAL)
    config = make_config(folder, evaluation_strategy="epoch", report_to=[tracker], run_name="checked", max_steps=4)
    Trainer(make_model(lora=True), config, Rows(16, seed=3), Rows(5, seed=4), Tokenizer()).train()
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = READERS[tracker](folder)
    for name in METRICS:
        key = name.removeprefix("train/").replace("eval/", "eval_")
        expected = {entry["step"]: entry[key] for entry in entries if key in entry}
        assert found[name].keys() == expected.keys() != set(), (name, found[name], expected)
        assert all(math.isclose(found[name][step], value, rel_tol=1e-6) for step, value in expected.items()), name
    version = importlib.metadata.version(TRACKER_MODULES[tracker])
    print(f"{tracker} {version}: read back {sum(map(len, found.values()))} values of {', '.join(METRICS)}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Upload the result of a run to the Hugging Face hub (`push_to_hub`). Paddle is not imported."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.checkpoint.hub_upload import check_hub_login, repo_of_run, upload_run
from paddlenlp_ext.config.sections.train import TrainConfig


def check_push(train: TrainConfig) -> None:
    """Check before a run that its result can be uploaded, if `push_to_hub` is set.

    Raises:
        ValueError: there is no token, HF_HUB_OFFLINE is set, or the name of the repository is invalid.
    """
    if train.push_to_hub:
        check_hub_login(repo_of_run(str(train.output_dir), train.hub_model_id), "push_to_hub")


def push_run(train: TrainConfig) -> str:
    """Upload the model or adapter in output_dir with its results, and return the address of the repository.

    Raises:
        UploadError: the upload failed.
    """
    return upload_run(Path(str(train.output_dir)), train.hub_model_id, train.hub_private_repo)

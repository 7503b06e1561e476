"""Upload the result of a run to the Hugging Face hub (`push_to_hub`). Paddle is not imported."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.checkpoint.hub_upload import check_hub_login, repo_of_run, upload_run
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.report.model_card import write_model_card


def check_push(train: TrainConfig) -> None:
    """Check before a run that its result can be uploaded, if `push_to_hub` is set.

    Raises:
        ValueError: there is no token, HF_HUB_OFFLINE is set, or the name of the repository is invalid.
    """
    if train.push_to_hub:
        check_hub_login(repo_of_run(str(train.output_dir), train.hub_model_id), "push_to_hub")


def push_run(train: TrainConfig) -> str:
    """Upload the model or adapter in output_dir with a model card and results, and return the repository's address.

    Raises:
        UploadError: the upload failed.
        ValueError: the model card cannot be written.
    """
    folder = Path(str(train.output_dir))
    write_model_card(folder, folder, repo_of_run(folder, train.hub_model_id))
    return upload_run(folder, train.hub_model_id, train.hub_private_repo)

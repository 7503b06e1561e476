"""Public functions and classes that combine models and adapters."""

from __future__ import annotations

import os
from typing import Any

from paddlenlp_ext.inference.auto_peft_model import AutoPeftModelForCausalLM as AutoPeftModelForCausalLM
from paddlenlp_ext.inference.auto_peft_model import (
    AutoPeftModelForSequenceClassification as AutoPeftModelForSequenceClassification,
)
from paddlenlp_ext.models.auto import load_for_task
from paddlenlp_ext.peft.merge import merge_adapter as merge


def merge_adapter(
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    **options: Any,
) -> merge.MergeReport:
    """Merge an adapter into its base model and save the merged model, as `llm/merge_peft_params.py` does.

    Args:
        adapter: folder of the adapter.
        output: folder to create for the merged model.
        base: name or path of the base model; None: the base model in the adapter config.
        options: `dtype`, `overwrite`, `allow_pickle` and `merge_base` of `peft.merge.merge_adapter.merge_adapter`.

    Raises:
        ValueError: see `peft.merge.merge_adapter.merge_adapter`. Partial output is removed.
    """
    return merge.merge_adapter(adapter, output, load_for_task, base, **options)

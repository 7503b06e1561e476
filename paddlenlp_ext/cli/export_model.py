"""Program llm/predict/export_model.py: merge an adapter, quantize, and write a static graph for paddle.inference."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.checkpoint.output_folder import check_output
from paddlenlp_ext.cli.export_model_arguments import ExportArguments
from paddlenlp_ext.inference.load_model import find_model_and_adapter, find_source, load_unmerged, quantize
from paddlenlp_ext.peft.merge.in_memory import require_mergeable_method
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.static_graph import export


def export_model(arguments: ExportArguments) -> str:
    """Export a model; return a one-line summary.

    Raises:
        ValueError: a model or adapter cannot be used, the adapter cannot be merged, `output_path` exists or cannot be
            written, the model is stored quantized and `quant_type` names another format, or
            `static_graph.export.export_model` raises a ValueError.
    """
    base, adapter = find_model_and_adapter(arguments)
    source, stored, _ = find_source(base, adapter)
    folder = Path(arguments.output_path).expanduser()
    adapter_folder = None if adapter is None else Path(adapter).expanduser()
    check_output(
        folder, arguments.overwrite, (source.path,) if adapter_folder is None else (source.path, adapter_folder)
    )
    if stored is not None:
        require_mergeable_method(stored.config)
    model = load_unmerged(arguments, base, adapter)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    quantize(model, arguments.quant_type)
    difference = export.export_model(model, folder, source, adapter_folder, arguments.model_prefix)
    return (
        f"{folder}: static graph of {base}{'' if adapter is None else f' with {adapter}'}. On fixed prompts, "
        f"logits of graph and model differ by up to {difference:.2g} of the largest logit."
    )

"""Export a model as a static graph: load it, merge its adapter, quantize it, write and check the program."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.cli.export_arguments import ExportArguments
from paddlenlp_ext.cli.predict import find_model_and_adapter, find_source, load_unmerged, quantize
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.static_graph import export


def export_model(arguments: ExportArguments) -> str:
    """Export a model; return a line that describes the result.

    Raises:
        ValueError: a model or adapter cannot be used, the adapter does not merge, the model is stored quantized and
            `quant_type` names another format, or see `static_graph.export.export_model`.
    """
    base, adapter = find_model_and_adapter(arguments)
    model = load_unmerged(arguments, base, adapter)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    quantize(model, arguments.quant_type)
    source, _, _ = find_source(base, adapter)
    report = export.export_model(
        model,
        arguments.output_path,
        source,
        None if adapter is None else Path(adapter).expanduser(),
        prefix=arguments.model_prefix,
        overwrite=arguments.overwrite,
    )
    return (
        f"{report.folder}: static graph of {base}{'' if adapter is None else f' with {adapter}'}. On fixed prompts its "
        f"logits differ from the model's by up to {report.difference:.2g} of the largest one."
    )

"""Program llm/export_gguf.py: write a GGUF file for llama.cpp and Ollama."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_ext._runtime import require_paddle
from paddlenlp_ext.checkpoint.gguf.tensor_types import OUTTYPES
from paddlenlp_ext.config.command_line import parse_arguments
from paddlenlp_ext.config.dataclass_options import option, options_of
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.utils.files import check_writable, write_text
from paddlenlp_ext.utils.locks import check_no_active_run
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import explained_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paddlenlp_ext.checkpoint.gguf.ollama_tools import WriteChat
    from paddlenlp_ext.data.templates.base import ChatTemplate

logger = get_logger("paddlenlp_ext.export")

_USAGE = """export_gguf.py --model_name_or_path MODEL [--lora_path ADAPTER] --output_file out.gguf [--outtype f16]

Write a model for llama.cpp and Ollama: weights, tokenizer and chat template in one file, and an Ollama Modelfile."""
_UNUSED = ("dtype", "use_flash_attention")


@dataclass(frozen=True, kw_only=True)
class ExportGgufArguments(ModelArguments):
    """Arguments of export_gguf.py."""

    output_file: str = option(MISSING, aliases=("out",), help="path of the .gguf file to write")
    outtype: str | None = option(
        None, choices=OUTTYPES, help="type of the weight matrices; unset: f16; norms, biases and routers are always f32"
    )
    adapter_only: bool = option(
        False, help="write only the adapter, in f32, for use with the GGUF file of the base model"
    )
    overwrite: bool = option(False, help="replace an existing file")
    allow_pickle: bool = option(
        False, help="read the .pdparams or .bin file of an adapter that has no safetensors file"
    )


def export_arguments(argv: Sequence[str], usage: str = _USAGE) -> ExportGgufArguments:
    """Parse the command line; `usage` is the beginning of the help text.

    Raises:
        ConfigError: arguments are unknown, missing or invalid; the message lists all problems.
    """
    options = [entry for entry in options_of(ExportGgufArguments, "arguments") if entry.attribute not in _UNUSED]
    values, _ = parse_arguments(argv, options, usage)
    return ExportGgufArguments(**values)


def run_export(arguments: ExportGgufArguments) -> str:
    """Write the GGUF file and, unless `adapter_only` is set, an Ollama Modelfile; return a one-line summary.

    Raises:
        ValueError: the model, the adapter or an argument cannot be used, or the file cannot be written.
        ModuleNotFoundError: Paddle or the gguf library is not installed.
    """
    require_paddle()
    from paddlenlp_ext.checkpoint.gguf.gguf_file import require_gguf
    from paddlenlp_ext.checkpoint.hub import resolve_model
    from paddlenlp_ext.inference.device_and_dtype import choose_device_or_cpu
    from paddlenlp_ext.inference.load_model import find_model_and_adapter
    from paddlenlp_ext.models.auto import load_for_task
    from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter

    require_gguf()
    base, adapter = find_model_and_adapter(arguments)
    output = check_output_file(arguments, base)
    choose_device_or_cpu(arguments.device or "auto")
    folders = [adapter, base]
    if arguments.adapter_only:
        return _export_adapter(arguments, output, base, adapter)
    if adapter is None:
        return _export(arguments, output, resolve_model(base), folders)
    with explained_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.", suffix=".merged") as folder:
            merged = Path(folder) / "model"
            report = merge_adapter(
                adapter, merged, load_for_task, base=base, dtype="float32", allow_pickle=arguments.allow_pickle
            )
            logger.info("%s: merged %d layers into %s", adapter, report.num_merged, report.merged_into)
            return _export(arguments, output, merged, folders)


def check_output_file(arguments: ExportGgufArguments, base: str) -> Path:
    """Check that the GGUF file can be written, and return its path.

    Args:
        arguments: the command line.
        base: name or path of the base model.

    Raises:
        ValueError: the path does not end in .gguf, cannot be written, is in the folder of an active run, or is the base
            model itself; or the file, or a Modelfile that would be written, exists, and `--overwrite` is not set.
    """
    output = Path(arguments.output_file).expanduser()
    if output.suffix != ".gguf":
        raise ValueError(f"output_file {output}: must end in .gguf")
    check_no_active_run(output)
    check_writable(output.parent, f"output_file {output}")
    written = (output,) if arguments.adapter_only else (output, modelfile_of(output))
    existing = next((path for path in written if path.exists()), None)
    if existing is not None and not (existing.is_file() and arguments.overwrite):
        raise ValueError(f"output_file {output}: {existing} exists; choose another name, or pass --overwrite true")
    if output.is_file() and output.resolve() == Path(base).expanduser().resolve():
        raise ValueError(f"output_file {output}: this file is the model to export; choose another name")
    return output


def modelfile_of(output: Path) -> Path:
    """Return the path of the Ollama Modelfile of a .gguf file."""
    return output.with_suffix(".Modelfile")


def _export(arguments: ExportGgufArguments, output: Path, model: Path, folders: Sequence[str | None]) -> str:
    """Convert `model`, a folder or .gguf file; `folders` are searched for the chat template of the training run."""
    from paddlenlp_ext.checkpoint.config_json import read_generation_config
    from paddlenlp_ext.checkpoint.gguf.ollama_modelfile import modelfile
    from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
    from paddlenlp_ext.inference.choose_chat_template import choose_template
    from paddlenlp_ext.models.gguf_export import export_gguf, file_tensors

    tokenizer = load_tokenizer(model)
    template = choose_template(arguments, folders, tokenizer)
    _use_template(tokenizer, template)
    generation = read_generation_config(model)
    stops = (*template.stop_token_ids, tokenizer.eos_token_id)
    ends = [*dict.fromkeys(end for end in (*generation["eos_token_id"], *stops) if end is not None)]
    config, tensors = file_tensors(model)
    name = Path(folders[0] or arguments.model_name_or_path).name.removesuffix(".gguf")
    outtype = arguments.outtype or "f16"
    with explained_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    export_gguf(output, config, tensors, tokenizer, ends, outtype, name)
    stop_texts = [str(text) for text in tokenizer.convert_ids_to_tokens(ends)]
    delimiters = chat_delimiters(tokenizer, template)
    beside = modelfile_of(output)
    write_text(beside, modelfile(output.name, delimiters, stop_texts, generation))
    size = output.stat().st_size / 1e6
    return f"{output}: {len(tensors)} tensors in {outtype}, {size:.0f} MB, read back and compared; {beside}"


def _export_adapter(arguments: ExportGgufArguments, output: Path, base: str, adapter: str | None) -> str:
    """Write the adapter without its base.

    Raises:
        ValueError: there is no adapter, `--outtype` is set and not f32, the adapter changes the config of its base, or
            `export_gguf_adapter` raises a ValueError.
    """
    from paddlenlp_ext.checkpoint.config_json import read_model_config
    from paddlenlp_ext.checkpoint.hub import resolve_model
    from paddlenlp_ext.models.auto import AutoModelForCausalLM
    from paddlenlp_ext.models.gguf_export import architecture_for
    from paddlenlp_ext.peft.formats.gguf import export_gguf_adapter
    from paddlenlp_ext.peft.formats.read_adapter import read_adapter
    from paddlenlp_ext.peft.peft_model import PeftModel

    if adapter is None:
        raise ValueError("adapter_only: pass --lora_path ADAPTER")
    if arguments.outtype not in (None, "f32"):
        raise ValueError(f"adapter_only: an adapter is written in f32, not {arguments.outtype}; leave out --outtype")
    stored = read_adapter(adapter, arguments.allow_pickle)
    if overrides := stored.base_overrides(read_model_config(resolve_model(base))):
        raise ValueError(
            f"adapter_only: {adapter} changes {', '.join(overrides)} in the config of its base model, and a GGUF "
            "adapter cannot store a config; leave out --adapter_only to merge the adapter"
        )
    if stored.quantization is not None:
        logger.warning(
            "%s was trained on %s weights; on a GGUF base of another type, answers differ slightly from training",
            *(adapter, stored.quantization.describe()),
        )
    adapted = PeftModel.from_files(AutoModelForCausalLM.from_pretrained(base), stored)
    with explained_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    count = export_gguf_adapter(output, adapted, architecture_for(adapted.base_model.config), Path(adapter).name)
    return f"{output}: adapter of {count} matrices for {base}, read back and compared"


def _use_template(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> None:
    """Store a Jinja template in the tokenizer, and thus in the GGUF file; store None for any other template."""
    from paddlenlp_ext.data.templates.jinja_template import JinjaTemplate

    if isinstance(template, JinjaTemplate):
        if template.options.kwargs:
            logger.warning(
                "the GGUF file cannot store chat_template_kwargs %s; pass them to llama.cpp", template.options
            )
        if tokenizer.chat_template is None or template.text != tokenizer.get_chat_template():
            tokenizer.chat_template = template.text
        return
    if tokenizer.chat_template is not None or template.text:
        logger.warning("the chat template is not Jinja, so it is written to the Modelfile, but not to the GGUF file")
    tokenizer.chat_template = None


def chat_delimiters(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> Any:
    """Return the constant text that the chat template writes around messages, without bos; None if this text varies."""
    from paddlenlp_ext.checkpoint.gguf.ollama_modelfile import find_delimiters
    from paddlenlp_ext.checkpoint.gguf.ollama_tools import ChatMessage
    from paddlenlp_ext.data.rows.conversation import Conversation, Message, ToolCall
    from paddlenlp_ext.data.rows.errors import InvalidRowError

    before = tokenizer.encode("")[:1]

    def write_conversation(conversation: Conversation) -> str:
        ids = template.encode_prompt(conversation)
        return str(tokenizer.decode(ids[1:] if before and ids[:1] == before else ids))

    def write(question: str, history: Sequence[tuple[str, str]], system: str | None) -> str:
        return write_conversation(Conversation.asking(question, history, system))

    def write_chat(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        written = (
            Message(role, content, tool_calls=tuple(ToolCall(*call) for call in calls))
            for role, content, calls in messages
        )
        return write_conversation(Conversation(tuple(written), tuple(tools)))

    try:
        delimiters = find_delimiters(write, write_chat)
    except InvalidRowError:
        delimiters = None
    if delimiters is None:
        logger.warning(
            "the text that the chat template adds depends on the messages, so the Modelfile has no template; Ollama "
            "uses the template in the GGUF file"
        )
    elif delimiters.tools is None and _writes_tools(write_chat):
        logger.warning(
            "the chat template does not write tools and calls as JSON, so the Modelfile's template has no tools, and "
            "Ollama refuses requests with tools; llama.cpp uses the template in the GGUF file, which supports tools"
        )
    return delimiters


def _writes_tools(write_chat: WriteChat) -> bool:
    """Return whether the prompt of a question changes if tools are passed."""
    from paddlenlp_ext.checkpoint.gguf.ollama_tools import TOOLS, USER

    try:
        return write_chat((USER,), TOOLS) != write_chat((USER,), ())
    except ValueError:
        return False

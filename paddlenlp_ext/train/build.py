"""The order in which a run is assembled: rows, model, adapter, recomputation, trainer. Data first: it fails fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.load import load_weights
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.checkpoint.resolve import resolve_model
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.checkpoint.weights import open_weights
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.dataset import TokenizedDataset, load_dataset
from paddlenlp_ext.data.template import ChatTemplate, load_template
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.initialize import initialize_weights
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.parallel.loading import read_own_part
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline import Pipeline
from paddlenlp_ext.parallel.ranks import MeshRanks
from paddlenlp_ext.parallel.sharding import Sharding, sharding_of
from paddlenlp_ext.parallel.stages import make_own, mark_stages, plan_stages
from paddlenlp_ext.parallel.tensor import apply_tensor_plan
from paddlenlp_ext.peft.base import get_peft_model
from paddlenlp_ext.train.callbacks import Callback
from paddlenlp_ext.train.passes import passes_of
from paddlenlp_ext.train.ranks import SingleRank
from paddlenlp_ext.train.trainer import Trainer
from paddlenlp_ext.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class RunData:
    """What a run reads before it touches any weight; a split that the run does not use is None."""

    tokenizer: Any
    template: ChatTemplate
    train_rows: TokenizedDataset | None
    dev_rows: TokenizedDataset | None


def load_data(config: RunConfig) -> RunData:
    """Tokenizer, template and the tokenized rows of the splits that the run uses.

    Raises:
        ValueError: no such model or dataset, or bad rows in it.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer_name_or_path or config.model.model_name_or_path)
    template = load_template(config.data.chat_template, tokenizer)
    train_rows = load_dataset(config.data, "train", tokenizer, template) if config.train.do_train else None
    dev_rows = load_dataset(config.data, "dev", tokenizer, template) if config.train.do_eval else None
    return RunData(tokenizer, template, train_rows, dev_rows)


def build_model(config: RunConfig) -> Any:
    """The decoder with its weights, adapted as the configuration says."""
    name, dtype = config.model.model_name_or_path, weight_dtype(config)
    if config.model.continue_training:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, use_flash_attention=config.model.use_flash_attention
        )
    else:
        model_config = read_model_config(resolve_model(name))
        model = AutoModelForCausalLM.from_config(model_config, seed=config.train.seed, dtype=dtype, name_or_path=name)
        if not config.model.use_flash_attention:
            model.use_attention("blocks")
    return adapt_model(model, config)


def build_cut_model(config: RunConfig, mesh: Mesh) -> tuple[Any, Sharding | None]:
    """This rank's part of the same model, and how the rest is shared.

    Where the adapter does not start from the base's values, the model is built for its shapes, cut, and only then read:
    each rank reads its slices alone. Else every rank builds the whole and keeps its part.
    """
    reads_later = config.model.continue_training and not (config.peft and config.peft.starts_from_weights)
    if reads_later:
        name, use_flash = config.model.model_name_or_path, config.model.use_flash_attention
        skeleton = AutoModelForCausalLM.without_values(name, weight_dtype(config), use_flash)
        model = adapt_model(skeleton, config)
    else:
        model = build_model(config)
    if mesh.tensor.size > 1:
        apply_tensor_plan(model, mesh.tensor, config.parallel.sequence_parallel)
    sharding = sharding_of(model, mesh, config.parallel.sharding)
    if reads_later:
        read_own_part(model, open_weights(resolve_model(config.model.model_name_or_path)))
    return model, sharding


def build_staged_model(config: RunConfig, mesh: Mesh) -> tuple[Any, Pipeline]:
    """This stage's layers of the same model, read alone, and its part of the pipeline.

    Raises:
        ValueError: the model has fewer layers than the pipeline has chunks; nothing has been read then.
    """
    own, name = mesh.pipeline.index, config.model.model_name_or_path
    model = AutoModelForCausalLM.without_values(name, weight_dtype(config), config.model.use_flash_attention)
    plan = plan_stages(model.config, mesh.pipeline.size, config.parallel.virtual_pp_degree)
    logger.info("pipeline:\n%s", plan.table())
    mark_stages(model, plan, own)
    make_own(model)
    if config.model.continue_training:
        load_weights(model, open_weights(resolve_model(name)))
    else:
        initialize_weights(model, config.train.seed, model.config.initializer_range)
    pipeline = Pipeline(plan, mesh.pipeline)
    pipeline.install(model)
    model = adapt_model(model, config)
    mark_stages(model, plan, own)
    if mesh.tensor.size > 1:
        apply_tensor_plan(model, mesh.tensor)
        mark_stages(model, plan, own)
    pipeline.install(model)
    return model, pipeline


def weight_dtype(config: RunConfig) -> str:
    """float32, but for O2 on an accelerator, where the weights have the type of the matrix products."""
    precision = config.precision
    return precision.compute_dtype if precision.fp16_opt_level == "O2" else "float32"


def adapt_model(model: Any, config: RunConfig) -> Any:
    """Switch recomputation on and inject the adapter. Reads no weights unless the method starts from them."""
    plan = RecomputePlan.from_config(config.train)
    if plan is not None:
        model.enable_recompute(plan)
    return model if config.peft is None else get_peft_model(model, config.peft, seed=config.train.seed)


def build_trainer(config: RunConfig, data: RunData, callbacks: Iterable[Callback] = ()) -> Trainer:
    """Everything, ready to train or evaluate, on the device that the configuration names."""
    paddle.set_device(config.precision.device)
    mesh = Mesh.from_config(config.parallel)
    pipeline = None
    if mesh.pipeline.size > 1:
        model, pipeline = build_staged_model(config, mesh)
        sharding = sharding_of(model, mesh, config.parallel.sharding)
    elif mesh.tensor.size > 1 or "stage3" in config.parallel.sharding.split():
        model, sharding = build_cut_model(config, mesh)
    else:
        model = build_model(config)
        sharding = sharding_of(model, mesh, config.parallel.sharding)
    model.end_at({*data.template.stop_token_ids, data.tokenizer.eos_token_id} - {None})
    ranks = SingleRank() if mesh.world.size == 1 else MeshRanks(mesh, sharding)
    rows, passes = (data.train_rows, data.dev_rows), passes_of(model, pipeline)
    return Trainer(model, config, *rows, data.tokenizer, callbacks=callbacks, ranks=ranks, passes=passes)

"""Tensor plans in a single process: errors, and the shard of every parameter that a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM, build_skeleton
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.parallel.load_weight_slices import load_shards
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.pipeline.stages import assign_stages, plan_stages
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.parallel.shard_parameters import shard_sizes
from paddlenlp_ext.parallel.tensor_parallel import apply_tensor_plan, check_sizes, check_tensor_plan, styles_by_name
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.oft import OFTConfig
from paddlenlp_ext.peft.modules_to_save import base_parameters
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from paddlenlp_ext.sharding_spec import Shard, full_shape, is_on_stage, placement_of, shard_of
from tests.common.models import TINY_LLAMA
from tests.models.tiny_model import make_model_with_sinks

BIASED = {**TINY_LLAMA, "tie_word_embeddings": False, "attention_bias": True}


def rank(index: int, size: int = 2) -> ProcessAxis:
    return ProcessAxis(index, size, None, tuple(range(size)))


@pytest.mark.parametrize(("size", "parts"), [(61, 2), (61, 4), (8, 8), (3, 4)])
def test_shard_sizes_add_up_and_differ_by_at_most_one(size, parts):
    sizes = shard_sizes(size, parts)
    assert sum(sizes) == size and len(sizes) == parts and max(sizes) - min(sizes) <= 1


def test_apply_tensor_plan_holds_and_reads_only_the_own_shard(tmp_path):
    full = AutoModelForCausalLM.from_config(BIASED, seed=3)
    values = {name: parameter.numpy() for name, parameter in full.named_parameters()}
    full.save_pretrained(tmp_path)
    seen = {name: np.zeros(value.shape, int) for name, value in values.items()}
    for index in range(2):
        model = AutoModelForCausalLM.from_config(BIASED, seed=3)
        apply_tensor_plan(model, rank(index))
        parameters = dict(model.named_parameters())
        assert (index == 1) == ("model.layers.0.self_attn.o_proj.bias" in model.remote_parameters)
        assert model.remote_parameters == values.keys() - parameters.keys()
        for name, parameter in parameters.items():
            shard = shard_of(parameter)
            own = values[name] if shard is None else values[name][shard.index]
            seen[name][... if shard is None else shard.index] += 1
            assert np.array_equal(parameter.numpy(), own) and full_shape(parameter) == values[name].shape
            assert np.array_equal(open_weights(tmp_path).read(name, shard=shard), own)
            parameter.set_value(np.zeros(own.shape, np.float32))
        model.load_weights(str(tmp_path))
        for name, parameter in model.named_parameters():
            shard = shard_of(parameter)
            assert np.array_equal(parameter.numpy(), values[name] if shard is None else values[name][shard.index])
    replicated = {"norm", "layernorm"}
    for name, times in seen.items():
        assert np.all(times == (2 if any(word in name for word in replicated) else 1)), name


def test_apply_tensor_plan_gives_each_rank_the_sinks_of_its_heads():
    full = make_model_with_sinks()
    for index in range(2):
        model = make_model_with_sinks()
        apply_tensor_plan(model, rank(index))
        for own, other in zip(model.model.layers, full.model.layers, strict=True):
            expected = np.split(other.self_attn.sinks.numpy(), 2)[index]
            assert np.array_equal(own.self_attn.sinks.numpy(), expected)
            assert np.array_equal(own.self_attn.score_options.sinks.numpy(), expected)
            assert full_shape(own.self_attn.sinks) == (4,)


class Slices(SafetensorsFile):
    """File that counts the values read."""

    num_read = 0

    def read(self, name, dtype=None, shard=None):
        values = super().read(name, dtype, shard)
        self.num_read += values.size
        return values


@pytest.mark.parametrize("modules", [None, (), ("lm_head", "norm")])
def test_load_shards_reads_only_the_own_slices(tmp_path, modules):
    has_adapter = modules is not None
    full = AutoModelForCausalLM.from_config(BIASED, seed=3)
    full.save_pretrained(tmp_path)
    if has_adapter:
        full = get_peft_model(full, LoRAConfig(rank=2, modules_to_save=modules), seed=5)
    values = {name: parameter.numpy() for name, parameter in full.named_parameters()}
    model = build_skeleton(ModelSource.resolve(tmp_path))
    if has_adapter:
        model = get_peft_model(model, LoRAConfig(rank=2, modules_to_save=modules), seed=5)
    apply_tensor_plan(model, rank(1))
    source = Slices(tmp_path / "model.safetensors")
    load_shards(model, source)
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        assert np.array_equal(parameter.numpy(), values[name] if shard is None else values[name][shard.index]), name
    assert source.num_read == sum(p.size for p in base_parameters(model.get_base_model()).values())


def test_load_shards_of_fused_layers_reads_only_the_own_rows_of_each_part(tmp_path):
    full = AutoModelForCausalLM.from_config({**TINY_LLAMA, "model_type": "phi3"}, seed=3)
    full.save_pretrained(tmp_path)
    model = build_skeleton(ModelSource.resolve(tmp_path))
    apply_tensor_plan(model, rank(1))
    source = Slices(tmp_path / "model.safetensors")
    load_shards(model, model.config.from_files(source))
    for (name, parameter), value in zip(model.named_parameters(), full.parameters(), strict=True):
        shard = shard_of(parameter)
        assert np.array_equal(parameter.numpy(), value.numpy() if shard is None else value.numpy()[shard.index]), name
    assert source.num_read == sum(parameter.size for parameter in model.parameters())


def test_load_shards_keeps_replaced_parameters_of_a_stored_adapter(tmp_path):
    base = AutoModelForCausalLM.from_config(BIASED, seed=3)
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoRAConfig(rank=2, modules_to_save=["lm_head"]))
    adapted.head_weight().set_value(adapted.head_weight() * 2)
    adapted.save_pretrained(tmp_path / "adapter")
    model = build_skeleton(ModelSource.resolve(tmp_path / "base"))
    model = get_peft_model(model, LoRAConfig(path=str(tmp_path / "adapter")))
    apply_tensor_plan(model, rank(1))
    load_shards(model, Slices(tmp_path / "base" / "model.safetensors"))
    part = model.head_weight()
    assert np.array_equal(part.numpy(), adapted.head_weight().numpy()[shard_of(part).index])


@pytest.mark.parametrize("is_tied", [False, True])
def test_apply_tensor_plan_shards_replaced_parameters_of_a_pipeline_stage(is_tied):
    options = {"trainable_bias": "all", "lora_bias": True, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}
    own = []
    for stage in range(2):
        model = AutoModelForCausalLM.from_config({**BIASED, "tie_word_embeddings": is_tied}, seed=3)
        plan = plan_stages(model.config, 2)
        assign_stages(model, plan, stage)
        adapted = get_peft_model(model, LoRAConfig(rank=2, **options))
        assign_stages(adapted, plan, stage)
        apply_tensor_plan(adapted, rank(0))
        assign_stages(adapted, plan, stage)
        state = adapted.adapter_state()
        assert shard_of(state["model.embed_tokens.weight"]) is not None
        assert not any(tensor.stop_gradient for tensor in state.values())
        own.append({name for name, tensor in state.items() if is_on_stage(tensor)})
    assert own[0] | own[1] == state.keys()
    assert own[0] & own[1] == ({"model.embed_tokens.weight"} if is_tied else set())


def test_check_sizes_with_an_indivisible_degree_names_the_largest_that_works():
    config = AutoModelForCausalLM.from_config(TINY_LLAMA).config
    with pytest.raises(ValueError, match=r"degree 4 does not divide num_key_value_heads 2 .* is 2$"):
        check_sizes(config, 4)
    check_sizes(config, 2)


def test_styles_by_name_with_a_plan_of_another_model_raises():
    model = AutoModelForCausalLM.from_config(TINY_LLAMA)
    plan = model.config.tensor_plan
    with pytest.raises(ValueError, match=r"contains model.layers.\*.mlp.wi, which matches no layer"):
        styles_by_name(model, {**plan, "model.layers.*.mlp.wi": "colwise"})
    without = {name: style for name, style in plan.items() if not name.endswith("up_proj")}
    with pytest.raises(ValueError, match=r"no entry for model.layers.0.mlp.up_proj, model.layers.1"):
        styles_by_name(model, without)


def test_apply_tensor_plan_with_an_unsupported_adapter_raises():
    mora = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA), peft_methods()["use_mora"](rank=4))
    with pytest.raises(ValueError, match="tensor_parallel_degree 1"):
        apply_tensor_plan(mora, rank(0))
    reft = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA), peft_methods()["reft"](rank=2))
    with pytest.raises(ValueError, match="set sequence_parallel: false"):
        apply_tensor_plan(reft, rank(0), SequenceShards(rank(0)))


def test_apply_tensor_plan_shards_an_adapter_as_its_base():
    model = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA), LoRAConfig(rank=3))
    apply_tensor_plan(model, rank(1))
    layer = model.base_model.model.layers[0]
    up, down = layer.mlp.up_proj, layer.mlp.down_proj
    assert shard_of(up.lora_B.weight) == Shard(0, 24, 48, 48) and shard_of(up.lora_A.weight) is None
    assert shard_of(down.lora_A.weight) == Shard(1, 24, 48, 48) and shard_of(down.lora_B.weight) is None
    assert placement_of(up.lora_A.weight).needs_tp_reduce and placement_of(down.lora_B.weight).needs_tp_reduce
    assert up.out_features == 24
    assert up.base.weight.stop_gradient and not up.lora_B.weight.stop_gradient


@pytest.mark.parametrize("blocks", [{"num_blocks": 1}, {"block_size": 32}, {"block_size": 32, "block_share": True}])
def test_apply_tensor_plan_through_a_block_of_oft_raises(blocks):
    """Check that a block of the rotation, of which a rank would have one half, cannot be sharded."""
    model = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA), OFTConfig(**blocks))
    with pytest.raises(
        ValueError, match=r"each process has 16 inputs of a layer, which is not a multiple of .* 32; .* divisor"
    ):
        apply_tensor_plan(model, rank(1))


def test_apply_tensor_plan_keeps_complete_quantized_experts():
    """Expect the same matrices with double quantization, of which a shard of a linear layer loses the 8-bit scales."""
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 4}, seed=0)
    options = QuantizationConfig(algo={".*experts.*": "nf4"}, double_quant=True)
    check_tensor_plan(model, 2, options)
    quantize_linears(model, options)
    experts = model.model.layers[1].mlp.experts
    full, scales = experts.gate_up_proj.weight_value().numpy(), experts.gate_up_proj.scales.dtype
    apply_tensor_plan(model, rank(1))
    assert (experts.first, experts.num_local) == (2, 2)
    assert experts.gate_up_proj.scales.dtype == scales and full_shape(experts.gate_up_proj.codes)[0] == 4
    np.testing.assert_array_equal(experts.gate_up_proj.weight_value().numpy(), full[2:])

"""AdaLoRA against Hugging Face PEFT step by step, and its options, checkpoints and budget.

The golden files are written by tests/golden/generators/make_adalora_golden.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.cli.dry_run import describe_run
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.method_internals.adalora_rank_allocator import BudgetSchedule, select_ranks
from paddlenlp_ext.peft.methods.adalora import AdaLoRAAdapter, AdaLoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import load_data
from tests.common.adapters import logits_of, loss_of, run_keys, tiny_model
from tests.golden import DATA
from tests.golden.cases.adalora_cases import CASES, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from tests.peft.methods import golden_checks as shared

FOLDER = DATA / "adalora"
both = pytest.mark.parametrize("case", CASES)


def load(case: str, which: str = "start") -> AdaLoRAAdapter:
    return PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), FOLDER / case / which)


def total_loss(model: AdaLoRAAdapter, case: str) -> paddle.Tensor:
    input_ids, labels = shared.make_inputs(CASES[case]["base"])
    labels[:, -1] = -100  # transformers shifts labels itself, so its last position has none
    return shared.mean_loss(model, input_ids, labels) + model.hooks.auxiliary_loss()


@both
def test_adalora_peft_adapter_gives_peft_logits_gradients_and_merged_weights(case: str):
    golden, model, base = shared.golden_of(FOLDER / case), load(case), CASES[case]["base"]
    logits = model(shared.ids_of(base))
    shared.close(logits, golden["logits"])
    total_loss(model, case).backward()
    shared.check_gradients(model.adapter_state(), shared.part_of(golden, "gradient"))
    shared.check_merged(model, base, golden, logits.numpy())


def test_adalora_fields_that_peft_ignores_or_leaves_null_are_accepted(tmp_path: Path):
    case = next(iter(CASES))
    folder = shutil.copytree(FOLDER / case / "start", tmp_path / "start")
    fields = json.loads((folder / "adapter_config.json").read_text())
    fields |= {"use_rslora": True, "alpha_pattern": {"q_proj": 3}, "target_modules": None, "beta1": None}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    model = PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), folder)
    shared.close(model(shared.ids_of(CASES[case]["base"])), shared.golden_of(FOLDER / case)["logits"])


@both
def test_adalora_each_step_has_peft_importance_budget_and_ranks(case: str, tmp_path: Path):
    golden, model, total = shared.golden_of(FOLDER / case), load(case).train(), CASES[case]["adalora"]["total_step"]
    optimizer, compared = shared.adamw(model, LEARNING_RATE, WEIGHT_DECAY, EPSILON), 0
    schedule = model.peft_config.schedule(
        total, sum(layer.rank for layer in model.adapter.layers().values()), len(model.adapter.layers())
    )
    for step in range(1, total + 1):
        loss = total_loss(model, case)
        np.testing.assert_allclose(float(loss), golden["losses"][step - 1], rtol=1e-5)
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.clear_grad()
        assert schedule.budget(step) == golden["budgets"][step - 1]
        for name, layer in model.adapter.layers().items():
            values = golden[f"values:{step}:{name}.lora_E"]
            shared.close(layer.lora_E, values, name)
            assert np.array_equal(layer.lora_E.numpy() == 0, values == 0)
        if model.adapter.importance.averages:
            for name, score in model.adapter.importance.scores(model.adapter.layers()).items():
                np.testing.assert_allclose(score, golden[f"score:{step}:{name}"], rtol=2e-3, atol=1e-9)
                compared += 1
    assert compared == sum(name.startswith("score:") for name in golden) > 0
    shared.check_tensors(model.adapter_state(), shared.part_of(golden, "trained"))
    # The rounding of all optimizer steps adds up, and depends on the processor.
    logits = model(shared.ids_of(CASES[case]["base"])).numpy()
    np.testing.assert_allclose(logits, golden["last_logits"], rtol=0, atol=2 * shared.TOLERANCE)

    model.save_finished(tmp_path)
    written, _ = shared.check_config_fields(tmp_path, FOLDER / case / "finished")
    assert any(not all(flags) for flags in written["rank_pattern"].values())


@both
def test_adalora_finished_peft_adapter_round_trips(case: str, tmp_path: Path):
    model = load(case, "finished")
    shared.close(model(shared.ids_of(CASES[case]["base"])), shared.golden_of(FOLDER / case)["last_logits"])
    for save in (model.save_pretrained, model.save_finished):
        save(tmp_path)
        shared.check_same_tensors(tmp_path, FOLDER / case / "finished")
    loaded = PeftModel.from_pretrained(load(case).merge_and_unload(), tmp_path)
    ranks = [layer.rank for layer in loaded.adapter.layers().values()]
    assert ranks == [layer.rank for layer in model.adapter.layers().values()]
    if case == "llama":
        assert len(ranks) < 6, "one layer must have lost all its ranks"


@both
def test_adalora_finished_adapter_merges_exactly(case: str):
    model = load(case, "finished")
    before = model(shared.ids_of(CASES[case]["base"])).numpy()
    shared.close(model.merge_and_unload()(shared.ids_of(CASES[case]["base"])), before)


def trained(steps: int, **options: object) -> tuple[AdaLoRAAdapter, list[float]]:
    config = AdaLoRAConfig(**{"init_r": 6, "target_r": 2, "orth_reg_weight": 0.1, **options})
    model, losses = get_peft_model(tiny_model(), config), []
    model.hooks.plan_steps(steps)
    optimizer = shared.adamw(model, 3e-2, 0.0, EPSILON)
    for step in range(1, steps + 1):
        loss = loss_of(model)
        losses.append(float(loss))
        (loss + model.hooks.auxiliary_loss()).backward()
        optimizer.step()
        model.hooks.after_step(step, steps, 3e-2)
        optimizer.clear_grad()
    return model, losses


def test_adalora_training_lowers_loss_within_budget():
    model, losses = trained(40)
    assert losses[-1] < 0.5 * losses[0]
    ranks = [int((layer.lora_E.numpy() != 0).sum()) for layer in model.adapter.layers().values()]
    assert sum(ranks) == 2 * len(ranks)
    assert len(set(ranks)) > 1, "all layers have the same rank"
    assert (model.peft_config.tinit, model.peft_config.tfinal) == (4, 12)


def test_save_finished_trained_adapter_is_smaller_with_equal_logits(tmp_path: Path):
    model, _ = trained(20)
    model.eval()
    model.save_pretrained(tmp_path / "checkpoint")
    model.save_finished(tmp_path / "finished")
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("checkpoint", "finished")]
    assert sizes[1] < 0.6 * sizes[0]
    for name in ("checkpoint", "finished"):
        loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / name)
        np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=shared.TOLERANCE)
    assert len(loaded.adapter.layers()) < 14, "no layer has lost all its ranks"
    tiny_model().save_pretrained(tmp_path / "base")
    folders = (tmp_path / "finished", tmp_path / "merged")
    report = merge_adapter(*folders, AutoModelForCausalLM.from_pretrained, base=tmp_path / "base")
    assert report.difference < shared.TOLERANCE * report.effect, "the difference must be rounding only"
    warm = get_peft_model(tiny_model(), AdaLoRAConfig(path=str(tmp_path / "finished"), target_r=2))
    assert sum(layer.rank for layer in warm.adapter.layers().values()) == 28
    for step in (1, 2, 3, 4):
        loss_of(warm).backward()
        warm.hooks.after_step(step, 4, 0.1)
    assert all((layer.lora_E.numpy() != 0).all() for layer in warm.adapter.layers().values()), (
        "the stored ranks are within the budget already"
    )


def test_adalora_layer_of_rank_zero_is_combined_and_saved_as_lora(tmp_path: Path):
    model, _ = trained(20)
    model.eval()
    model.save_finished(tmp_path / "finished")
    finished = PeftModel.from_pretrained(tiny_model(), tmp_path / "finished")
    assert len(finished.adapter.layers()) < 14, "no layer has lost all its ranks"
    save_as_lora(finished, tmp_path / "lora")
    for loaded in (
        PeftModel.from_pretrained(tiny_model(), tmp_path / "lora"),
        load_combined(tiny_model(), {tmp_path / "finished": 1.0}),
    ):
        np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=shared.TOLERANCE)


def test_plan_steps_unset_steps_changes_model_config_only(tmp_path: Path):
    config = AdaLoRAConfig(init_r=3, target_r=2)
    for total in (40, 20):
        model = get_peft_model(tiny_model(), config)
        model.hooks.plan_steps(total)
        model.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (written["tinit"], written["tfinal"], written["total_step"]) == (total // 10, 3 * total // 10, total)
    assert (config.tinit, config.tfinal, config.total_step) == (None, None, None)


def test_after_step_single_step_run_selects_ranks():
    model = get_peft_model(tiny_model(), AdaLoRAConfig(init_r=3, target_r=2)).train()
    model.hooks.plan_steps(1)
    for layer in model.adapter.layers().values():
        layer.lora_E.set_value(paddle.to_tensor([[1.0], [2.0], [3.0]]))
    loss_of(model).backward()
    model.hooks.after_step(1, 1, LEARNING_RATE)
    left = [int((layer.lora_E.numpy() != 0).sum()) for layer in model.adapter.layers().values()]
    assert sum(left) == 2 * len(left) and not model.adapter.importance.averages


def test_after_step_last_selection_uses_the_averages_before_it():
    """Check PEFT's order: the gradients of the step that fixes the ranks no longer count in the averages."""
    model = get_peft_model(
        tiny_model(), AdaLoRAConfig(init_r=2, target_r=1, tinit=0, tfinal=1, target_modules=("q_proj",))
    )
    model.hooks.plan_steps(3)
    for layer in model.adapter.layers().values():
        layer.lora_E.set_value(paddle.to_tensor([[1.0], [1.0]]))

    def step(number: int, scales: list[float]) -> None:
        for layer in model.adapter.layers().values():
            for name, tensor in layer.triplets().items():
                scale = paddle.to_tensor(scales) if name == "lora_B" else paddle.to_tensor(scales).unsqueeze(-1)
                tensor.grad = paddle.ones_like(tensor) * scale
        model.hooks.after_step(number, 3, 0.1)

    step(1, [1.0, 2.0])
    assert all(
        list(model.adapter.importance.scores({name: layer})[name].argsort()) == [0, 1]
        for name, layer in model.adapter.layers().items()
    )
    model.adapter.masks.clear()
    for layer in model.adapter.layers().values():
        layer.lora_E.set_value(paddle.to_tensor([[1.0], [1.0]]))
    step(2, [1000.0, 0.0])
    assert [layer.lora_E.numpy().flatten().tolist() for layer in model.adapter.layers().values()] == [[0.0, 1.0]] * 2
    assert not model.adapter.importance.averages


def test_plan_steps_schedule_too_long_raises_before_first_step():
    model = get_peft_model(tiny_model(), AdaLoRAConfig(tinit=10, tfinal=20))
    with pytest.raises(ValueError, match=r"adalora_tinit=10 and adalora_tfinal=20 leave none of the 30 steps"):
        model.hooks.plan_steps(30)


def test_adalora_run_too_short_raises_in_dry_run_and_training(run_folders: Path, tmp_path: Path):
    keys = run_keys(run_folders, adalora=True, adalora_tinit=3)
    (tmp_path / "run.json").write_text(json.dumps(keys))
    config = load_run_config([str(tmp_path / "run.json")], peft_methods())
    data = load_data(config)
    message = "adalora_tinit=3 and adalora_tfinal=0 leave none of the 3 steps for"
    with pytest.raises(ValueError, match=message):
        describe_run(config, data)
    trainer = build_trainer(config, data)
    before = {name: tensor.numpy().copy() for name, tensor in trainer.model.adapter_state().items()}
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert all(np.array_equal(tensor, before[name]) for name, tensor in trainer.model.adapter_state().items())


def test_save_finished_untrained_adapter_keeps_all_ranks(tmp_path: Path):
    model = get_peft_model(tiny_model(), AdaLoRAConfig(init_r=3, target_r=2))
    model.save_finished(tmp_path)
    assert all(layer.rank == 3 for layer in PeftModel.from_pretrained(tiny_model(), tmp_path).adapter.layers().values())


def test_budget_schedule_follows_cubic_formula():
    schedule = BudgetSchedule(initial=48, target=16, warmup=10, final=20, interval=5, total_steps=100)
    assert [schedule.budget(step) for step in (1, 10, 11, 45, 79, 80, 81, 100)] == [
        48, 48, int(32 * (69 / 70) ** 3 + 16), 20, 16, 16, 16, 16,
    ]  # fmt: skip
    assert [step for step in range(1, 101) if schedule.updates_ranks(step)] == list(range(15, 81, 5))
    with pytest.raises(ValueError, match=r"adalora_tinit=10 and adalora_tfinal=20 leave none of the 30 steps"):
        BudgetSchedule(initial=48, target=16, warmup=10, final=20, interval=5, total_steps=30)


def test_select_ranks_keeps_best_of_all_layers():
    scores = {"a": np.array([5.0, 1.0, 3.0]), "b": np.array([2.0, 4.0])}
    assert {name: kept.tolist() for name, kept in select_ranks(scores, 3).items()} == {
        "a": [True, False, True],
        "b": [False, True],
    }
    assert all(kept.all() for kept in select_ranks(scores, 5).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_r": 13}, "adalora_target_r=13 is above adalora_init_r=12"),
        ({"beta1": 1.0}, "beta1: 1.0 is out of range"),
        ({"alpha": 0}, "alpha: 0 is out of range"),
        ({"delta_t": 0}, "adalora_deltaT: 0 is out of range"),
        ({"dropout": 1.0}, "dropout: 1.0 is out of range"),
    ],
)
def test_adalora_config_value_out_of_range_raises(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        AdaLoRAConfig(**options)


def test_adalora_half_precision_base_keeps_singular_values_float32(tmp_path: Path):
    model = get_peft_model(tiny_model().to(dtype="float16"), AdaLoRAConfig(init_r=3, target_r=2))
    for layer in model.adapter.layers().values():
        assert (layer.lora_E.dtype, layer.lora_A.dtype) == (paddle.float32, paddle.float16)
        layer.lora_E.set_value(np.array([[0.5], [0.25], [1.0]], np.float32))
        layer.prune(np.array([True, False, True]))
    model.save_finished(tmp_path)
    file = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    assert {file.dtype(name) for name in file.names() if not name.endswith("lora_E")} == {"float16"}
    ours, theirs = model.adapter.layers(), PeftModel.from_pretrained(tiny_model(), tmp_path).adapter.layers()
    for name, layer in theirs.items():
        assert layer.rank == 2
        shared.close(layer.delta_weight(), ours[name].delta_weight().numpy(), name)


def test_update_and_allocate_in_ones_own_loop_gives_the_adapter_of_the_training_hooks():
    total = 6
    models = [get_peft_model(tiny_model(), AdaLoRAConfig(init_r=4, target_r=2, total_step=total)) for _ in range(2)]
    models[1].hooks.plan_steps(total)
    for model, update in zip(models, ("own", "hooks"), strict=True):
        optimizer = shared.adamw(model, 0.01, 0.0, 1e-8)
        for step in range(1, total + 1):
            (loss_of(model) + model.auxiliary_loss()).backward()
            optimizer.step()
            if update == "own":
                model.update_and_allocate(step)
            else:
                model.hooks.after_step(step, total, 0.01)
            optimizer.clear_grad()
    own, hooks = ({name: tensor.numpy() for name, tensor in model.adapter_state().items()} for model in models)
    assert all(np.array_equal(own[name], hooks[name]) for name in own)
    pruned = sum(int((value == 0).sum()) for name, value in own.items() if name.endswith("lora_E"))
    assert pruned == 2 * len(models[0].adapter.layers())


def test_update_and_allocate_needs_total_step_and_the_active_adapter():
    model = get_peft_model(tiny_model(), AdaLoRAConfig(init_r=4, target_r=2))
    with pytest.raises(ValueError, match="pass total_step to AdaLoraConfig"):
        model.base_model.update_and_allocate(1)
    assert not hasattr(model.unload(), "update_and_allocate")

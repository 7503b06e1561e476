"""VeRA: Vector-based Random Matrix Adaptation (Kopiczko et al. 2023, arXiv:2310.11454).

    y = x W^T + b * ((d * (dropout(x) A^T)) B^T)        delta W = diag(b) B diag(d) A

| tensor | shape | start | |
| --- | --- | --- | --- |
| A | [r, max in] | random | frozen and shared by all layers; a layer uses the first `in` columns |
| B | [max out, r] | random | frozen and shared by all layers; a layer uses the first `out` rows |
| d | [r] | d_initial | trained, one per layer |
| b | [out] | 0 | trained, one per layer |

`projection_prng_key` and the shapes determine A and B, which are bitwise equal to the matrices of Hugging Face PEFT.
Adapters saved without A and B can therefore be loaded in both libraries. PEFT draws A and B with
`torch.Generator().manual_seed(key)`, the Mersenne Twister MT19937 with 32-bit seeding (Matsumoto and Nishimura 1998).
NumPy has the same generator. PyTorch's `Tensor.uniform_` of float32 uses the low 24 bits of each output.

Shapes: r rank; in/out features of the adapted linear; max in/max out: largest in/out of all adapted layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.layers import LinearAdapter, adapter_layers_of, as_linear, factor_axes, first_features
from paddlenlp_ext.peft.linear_method_config import LinearTargetsConfig, dropout_option, rank_option
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import shortest_targets, targets_from_peft
from paddlenlp_ext.sharding_spec import Style


class Projections:
    """Frozen random matrices that all layers share: `a` [r, max in] and `b` [max out, r].

    Args:
        rank: r.
        widest_in: maximum number of input features of the adapted layers.
        widest_out: maximum number of output features of the adapted layers.
        key: seed of the values.
        dtype: dtype of the base.
        stored: save `a` and `b` with the adapter, in addition to `key`.
    """

    def __init__(
        self, rank: int, widest_in: int, widest_out: int, key: int, dtype: paddle.dtype, stored: bool = True
    ) -> None:
        self.key, self.dtype, self.stored = key, dtype, stored
        self.a, self.b = self._draw(rank, widest_in, widest_out)

    def redraw(self, key: int) -> None:
        """Draw `a` and `b` again with a different key, in place."""
        self.key = key
        rank, widest_in = self.a.shape
        for old, new in zip((self.a, self.b), self._draw(rank, widest_in, self.b.shape[0]), strict=True):
            old.set_value(new)

    def _draw(self, rank: int, widest_in: int, widest_out: int) -> list[paddle.Tensor]:
        """Draw A, then B, Kaiming-uniform for ReLU: U(-sqrt(6 / in), sqrt(6 / in)) for a matrix [out, in]."""
        source = TorchUniform(self.key)
        shapes = ((rank, widest_in), (widest_out, rank))
        values = [source.draw(shape, (6 / shape[1]) ** 0.5) for shape in shapes]
        return [paddle.to_tensor(value).astype(self.dtype) for value in values]


class TorchUniform:
    """Generator of uniform float32 values that are bitwise equal to the values of PyTorch's generator on the CPU.

    Args:
        key: seed; only the low 32 bits are used.
    """

    def __init__(self, key: int) -> None:
        self._bits = np.random.RandomState(key & 0xFFFFFFFF)

    def draw(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        """Draw an array from U(-bound, bound); the elements are drawn in memory order."""
        raw = self._bits.randint(0, 2**32, shape, dtype=np.uint32) & np.uint32(0xFFFFFF)
        low, high = np.float32(-bound), np.float32(bound)
        # PyTorch uses a fused multiply-add, which rounds once. Computing in float64 gives the same result.
        return (raw * 2.0**-24 * float(high - low) + float(low)).astype(np.float32)


class VeRAAdapter(Adapter):
    """Adapter that resumes with the shared matrices of the checkpoint, even if the run sets a different key."""

    peft_config: VeRAConfig

    def resume_from(self, stored: AdapterFiles) -> None:
        super().resume_from(stored)
        assert isinstance(stored.config, VeRAConfig)
        key = stored.config.projection_prng_key
        assert key is not None, "a stored config must have projection_prng_key"
        pairs = {
            id(layer.projections): layer.projections for _, layer in adapter_layers_of(self.base_model, VeRALinear)
        }
        for pair in pairs.values():
            if pair.stored:
                pair.key = key
            else:
                pair.redraw(key)


@PEFT_METHODS.register("vera")
@dataclass(kw_only=True)
class VeRAConfig(LinearTargetsConfig):
    """Options of VeRA: two trained vectors per layer, and one pair of random matrices that all layers share.

    >>> VeRAConfig(r=256, save_projection=False).d_initial
    0.1
    """

    peft_type: ClassVar[str] = "VERA"
    targets_key: ClassVar[str] = "vera_target_modules"
    adapter_class: ClassVar[type[TrainingHooks] | None] = VeRAAdapter
    own_keys: ClassVar[Mapping[str, str]] = {"vera_A": "base_model.vera_A", "vera_B": "base_model.vera_B"}
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = PaddleNLPFiles("vera_config.json")
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {
        *("alpha", "d_initial", "projection_prng_key", "vera_dropout"),
    }

    r: int = rank_option(8, "vera_rank", "rank r of the shared matrices; a layer trains r + out_features values")
    alpha: float | None = option(
        None,
        help="accepted for compatibility with PaddleNLP's configurations; VeRA has no scaling factor, so only the "
        "value of vera_rank is allowed",
    )
    vera_dropout: float = dropout_option("vera_dropout")
    d_initial: float = option(0.1, help="initial value of every element of the trained vector d", above=0)
    projection_prng_key: int | None = option(None, help="seed of the shared matrices; unset: the run's seed", minimum=0)
    save_projection: bool = option(True, help="save the shared matrices with the adapter, not only their seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha not in (None, self.r):
            raise ValueError(
                f"vera_alpha={self.alpha!r} differs from vera_rank={self.r!r}, and VeRA has no scale; leave out "
                "vera_alpha, and set the initial size of the update with vera_d_initial"
            )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> VeRALinear:
        return self.wrapper({name: base}, seed)(name, base)

    def wrapper(self, bases: Mapping[str, Any], seed: int) -> Callable[[str, nn.Layer], VeRALinear]:
        widest_in = max(base.in_features for base in bases.values())
        widest_out = max(base.out_features for base in bases.values())
        key = seed if self.projection_prng_key is None else self.projection_prng_key
        projections = functools.cache(
            lambda dtype: Projections(self.r, widest_in, widest_out, key, dtype, self.save_projection)
        )
        return lambda name, base: VeRALinear(
            base, projections(as_linear(base).compute_dtype), self.d_initial, self.vera_dropout
        )

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        layers = dict(adapter_layers_of(model, VeRALinear))
        return {
            "r": self.r,
            "vera_dropout": self.vera_dropout,
            "d_initial": self.d_initial,
            "projection_prng_key": next(iter(layers.values())).projections.key,
            "save_projection": self.save_projection,
            "target_modules": shortest_targets(list(layers), model),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_weights": True,
            "modules_to_save": None,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> VeRAConfig:
        read = {"r", "vera_dropout", "d_initial", "projection_prng_key", "save_projection", "target_modules"}
        read |= {"layers_to_transform", "layers_pattern"}
        if fields.get("init_weights") is True:  # this field affects only initial values
            read.add("init_weights")
        refuse_unread_fields(fields, read)
        return cls(
            r=fields.get("r", 256),
            vera_dropout=fields.get("vera_dropout", 0.0),
            d_initial=fields.get("d_initial", 0.1),
            projection_prng_key=fields.get("projection_prng_key", 0),
            save_projection=fields.get("save_projection", True),
            target_modules=targets_from_peft(fields),
        )

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> VeRAConfig:
        raise ValueError(
            "PaddleNLP's VeRA has a matrix A in each layer, random or computed from the weights (pissa_init="
            f"{fields.get('pissa_init', False)!r}), but does not save A, so the adapter cannot be loaded; merge the "
            "adapter with PaddleNLP's merge_vera_params.py and continue from the merged model, or train a new adapter"
        )


VeraConfig = VeRAConfig  # the spelling of Hugging Face PEFT


class VeRALinear(LinearAdapter):
    """Linear layer with a random low-rank update scaled by two trained vectors.

    Args:
        projections: shared matrices, in the dtype of the base.
        d_initial: initial value of d.
    """

    def __init__(self, base: nn.Layer, projections: Projections, d_initial: float, dropout: float) -> None:
        super().__init__(base)
        self.projections = projections
        self.dropout = dropout
        self.vera_lambda_d = self.new_parameter(np.full(projections.a.shape[0], d_initial, np.float32))
        self.vera_lambda_b = self.new_parameter(np.zeros(self.out_features, np.float32))

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; b scales B, so that the output is not saved for the backward pass."""
        inner = self.apply_dropout(x)
        inner = paddle.matmul(inner, self._input_columns(), transpose_y=True) * self.vera_lambda_d
        b = self._output_rows() * self.vera_lambda_b.unsqueeze(-1)
        return self.base(x) + paddle.matmul(inner, b, transpose_y=True)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return diag(d) A and diag(b) B."""
        a = self._input_columns().astype("float32") * self.vera_lambda_d.astype("float32").unsqueeze(-1)
        b = self._output_rows().astype("float32") * self.vera_lambda_b.astype("float32").unsqueeze(-1)
        return a, b

    def shared_state(self) -> dict[str, paddle.Tensor]:
        return {"vera_A": self.projections.a, "vera_B": self.projections.b} if self.projections.stored else {}

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        return {"vera_lambda_d": None, "vera_lambda_b": factor_axes(style)[1]}

    def _input_columns(self) -> paddle.Tensor:
        _, first = first_features(self)
        return self.projections.a[:, first : first + self.in_features]

    def _output_rows(self) -> paddle.Tensor:
        first, _ = first_features(self)
        return self.projections.b[first : first + self.out_features]

"""What layers emit as operations of a C++ program: a field that no ``emit`` names is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tests.fakes.paged_runner import CPU, PagedRunner

from radixlm.arch import spec as records
from radixlm.arch.spec import (
    Attention,
    AttentionExtras,
    Block,
    Decoder,
    DeltaNet,
    LatentAttention,
    LayerInputs,
    LogNScaling,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    Norm,
    ParallelHybrid,
    Rope,
    ShortConv,
)
from radixlm.base.record import Record, replace
from radixlm.kernels import cpu
from radixlm.kernels.dispatch import bind
from radixlm.layers.program import Unsupported, handles
from radixlm.models.build import build_model
from radixlm.models.program.step import why_no_program
from radixlm.weights.load import load_weights

pytestmark = pytest.mark.skipif(not cpu.available, reason=cpu.reason)

RMS = Norm(1e-6)
ROPE = Rope(8, 1e4)
PLAIN = Attention(4, 2, 12, ROPE, qk_norm="head", qk_norm_spec=RMS)
DENSE = Mlp(40, "silu")
LATENT = LatentAttention(4, 12, 8, 16, 24, 20, ROPE, RMS, 0.2)
SSD = Mamba2(6, 10, 9, 2, 4, RMS)
SCALING = LogNScaling(0.1, 4.0)
EXTRAS = AttentionExtras(logn_scaling=SCALING, v_norm=RMS)
BLOCKS = {
    "plain": Block(PLAIN, DENSE, RMS),
    "extras": Block(replace(PLAIN, extras=EXTRAS), DENSE, RMS, "sandwich"),
    "latents": Block(LATENT, Moe(4, 2, 20, "silu", shared=DENSE), RMS),
    "hybrid": Block(ParallelHybrid(PLAIN, SSD), DENSE, RMS, "parallel"),
    "short conv": Block(ShortConv(48, 3), DENSE, RMS),
    "mamba": Block(Mamba1(56, 9, 5, 4), DENSE, RMS),
    "delta": Block(DeltaNet(2, 4, 12, 20, 4, RMS), DENSE, RMS),
}


def decoder_of(name: str) -> Decoder:
    block = BLOCKS[name]
    return Decoder(70, 48, (block, block), RMS, 64, layer_inputs=LayerInputs(12, 60, "silu"))


def loaded(decoder: Decoder, folder: Any) -> Any:
    model = build_model(decoder, CPU, torch.float32, bind("cpu"))
    load_weights(model, folder, "dummy", progress=False)
    return model


def with_new_field(record: Record, kind: type[Record], value: int) -> Any:
    """The record, where every part of a kind has one more field."""
    parts = {}
    for name in record.__struct_fields__:
        part = getattr(record, name)
        if isinstance(part, Record):
            parts[name] = with_new_field(part, kind, value)
        elif isinstance(part, tuple) and part and isinstance(part[0], Record):
            parts[name] = tuple(with_new_field(one, kind, value) for one in part)
    record = replace(record, **parts)
    if type(record) is not kind:
        return record
    wider = msgspec.defstruct(kind.__name__, [("new", int, 0)], bases=(kind,), frozen=True)
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return wider(**values, new=value)


def kinds_of(record: Record) -> set[type[Record]]:
    """All records that a record is made of."""
    found = {type(record)}
    for name in record.__struct_fields__:
        part = getattr(record, name)
        for one in part if isinstance(part, tuple) else (part,):
            if isinstance(one, Record):
                found |= kinds_of(one)
    return found


CASES = [
    (name, kind)
    for name in BLOCKS
    for kind in sorted(kinds_of(decoder_of(name)), key=lambda kind: kind.__name__)
]


@pytest.mark.parametrize(
    ("name", "kind"), CASES, ids=[f"{name}-{kind.__name__}" for name, kind in CASES]
)
def test_a_new_field_is_refused_unless_it_has_its_default(
    name: str, kind: type[Record], tmp_path: Any
) -> None:
    """Of every record that a model is made of."""
    for value, reason in ((0, ""), (1, f"{kind.__name__}.new=1")):
        model = loaded(with_new_field(decoder_of(name), kind, value), tmp_path)
        assert why_no_program(model) == reason


def test_handles_names_the_field_and_its_value() -> None:
    handles(DENSE, "inner", "act")
    handles(replace(DENSE, gated=False), "inner", "act", "gated")
    with pytest.raises(Unsupported, match=r"Mlp\.gated=False"):
        handles(replace(DENSE, gated=False), "inner", "act")
    with pytest.raises(Unsupported, match=r"Mlp\.inner=40"):
        handles(DENSE, "act")


def test_a_refused_model_runs_layer_by_layer(tmp_path: Any) -> None:
    block = Block(PLAIN, DENSE, RMS, residual_channels=True)
    model = loaded(Decoder(70, 48, (block,), RMS, 64), tmp_path)
    PagedRunner(model, "cpu", 16).step({0: [5, 6]})
    assert model.program is None and why_no_program(model) == "Block.residual_channels=True"


def test_all_records_of_the_vocabulary_are_frozen() -> None:
    """``handles`` compares fields with the defaults of ``__struct_defaults__``."""
    for kind in vars(records).values():
        if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record:
            assert kind.__struct_config__.frozen

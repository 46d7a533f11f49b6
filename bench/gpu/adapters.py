"""Stage 8: steps of the 8B shape with adapters of rank 16 in all linear layers, beside the same
steps without."""

from __future__ import annotations

from functools import partial

import torch

from gpu.decode import flags_of, shape_of, weights_fit
from gpu.random_engine import Engine, opened
from gpu.roofline import CONTEXT
from gpu.session import Session
from gpu.steps import kernels_of, time_steps
from radixlm.kernels.ops.lora import LoraPart
from radixlm.layers.linear import Linear
from radixlm.lora.table import AdapterTable
from radixlm.models.decoder import DecoderModel

RANK, COUNT = 16, 8
BATCHES, PROMPTS = (1, 8, 64, 256), ((1, 128), (1, 2048))


def run(s: Session) -> None:
    """Decodes without adapters, with one and with eight; prompts without and with one."""
    shape, batches = shape_of(s, "8B"), (1, 3) if s.is_smoke else BATCHES
    if not weights_fit(s, shape, "bf16"):
        s.add(model=shape.name, skipped="does not fit the device")
        return
    flags = [*flags_of(s, "bf16", batches), "--enable-lora", "--max-loras-per-batch", str(COUNT)]
    with opened(s, shape, *flags, "--mem-fraction-static", "0.8") as engine:
        engine.fill_cache()
        _load(engine)
        context = 48 if s.is_smoke else CONTEXT
        for batch in batches:
            if not engine.takes(batch, context):
                s.add(batch=batch, skipped=f"the cache holds {engine.num_tokens} tokens")
                continue
            counts = (0, 1, COUNT) if batch > 1 else (0, 1)
            _measure(s, engine, counts, batch, context, is_decode=True)
        for batch, count in ((1, 16),) if s.is_smoke else PROMPTS:
            _measure(s, engine, (0, 1), batch, count, is_decode=False)


def _measure(
    s: Session, engine: Engine, counts: tuple[int, ...], batch: int, tokens: int, is_decode: bool
) -> None:
    items = engine.decodes(batch, tokens) if is_decode else engine.prompts(batch, tokens, 0)
    none_ms = 0.0
    for count in counts:
        enter = engine.enter(batch, tokens, range(count))
        times = time_steps(s, engine, enter, items)
        none_ms = none_ms or times.gpu_ms
        s.add(
            kind="decode" if is_decode else "prompt", batch=batch, tokens=tokens, adapters=count,
            step_ms=times.gpu_ms, host_us=times.host_us, ratio=times.gpu_ms / none_ms,
        )  # fmt: skip
        if is_decode and batch in (1, 3, 64) and count:
            found = kernels_of(s, partial(time_steps, s, engine, enter, items, 1), 12)
            s.add(batch=batch, adapters=count, kernels=found)


def _load(engine: Engine) -> None:
    """Adapters of small random numbers, as many as may meet."""
    table, model = engine.runner.adapters, engine.runner.model
    assert isinstance(table, AdapterTable) and isinstance(model, DecoderModel)
    where = engine.runner.device.where
    for number in range(COUNT):
        parts = {}
        for layer in model.adapted:
            if isinstance(layer, Linear):
                shard = layer.own_params()["weight"].shard
                widths = shard.parts if shard is not None and shard.dim == 0 else ()
                parts[layer.site] = _parts(layer, widths or (layer.out_features,), where)
        table.put(number, table.pack(parts))


def _parts(layer: Linear, widths: tuple[int, ...], where: torch.device) -> list[LoraPart]:
    found, first = list[LoraPart](), 0
    for width in widths:
        a_RI = torch.randn(RANK, layer.in_features, device=where, dtype=torch.bfloat16)
        b_OR = torch.randn(width, RANK, device=where, dtype=torch.bfloat16)
        found.append(LoraPart(a_RI, b_OR, 1e-4, first))
        first += width
    return found

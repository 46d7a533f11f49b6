"""Stage 2: two layers of each shape against Hugging Face in float32. Tokens must not change with
chunks, graphs, overlap or a cached prefix."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.decode import shape_of
from gpu.random_engine import Engine, opened
from gpu.requests import BenchRequest
from gpu.roofline import SHAPES, Shape
from gpu.scheduler_run import drive
from gpu.session import Session, relative
from radixlm.base.record import replace
from radixlm.step.plan import Item, StepPlan

BOUND = 1e-2
VOCAB = 32000  # the test is about the layers
PLAIN = ("--max-running-requests", "8", "--max-total-tokens", "8192")
WAYS: dict[str, tuple[str, ...]] = {  # the first two with --quick
    "no graphs, no overlap": ("--disable-cuda-graph", "--disable-overlap-schedule"),
    "chunks": ("--chunked-prefill-size", "64"),
    "no graphs": ("--disable-cuda-graph",),
    "no overlap": ("--disable-overlap-schedule",),
    "no prefix cache": ("--disable-radix-cache",),
}


def run(s: Session) -> None:
    """Raises at the end if numbers or tokens differ too much."""
    off = []
    most = (1 if s.is_smoke else 2) if s.quick else 3
    for name in list(SHAPES)[:most]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            shape = _two_layers(s, name)
            reference = _checkpoint(s, shape, folder)
            off += _numbers(s, shape, folder, reference)
            del reference
            s.free()
            off += _tokens(s, shape, folder)
    if off:
        raise AssertionError(f"off: {', '.join(off)}")


def _two_layers(s: Session, name: str) -> Shape:
    shape = replace(shape_of(s, name), layers=2)
    return shape if s.is_smoke else replace(shape, vocab=VOCAB)


def _checkpoint(s: Session, shape: Shape, folder: Path) -> Any:
    """Writes random weights that bfloat16 represents; the Hugging Face model in float32."""
    config = shape.config("float32", 4096)
    (folder / "config.json").write_text(json.dumps(config))
    described = AutoConfig.from_pretrained(folder)
    with torch.device(s.device):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    del model
    ways = {"attn_implementation": "eager"}
    if shape.experts:
        ways["experts_implementation"] = "eager"  # the other backends need 16 bits
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **ways)
    return made.to(s.device).eval()


@torch.inference_mode()
def _numbers(s: Session, shape: Shape, folder: Path, reference: Any) -> list[str]:
    """Logits of a whole prompt, of a prompt in chunks, and of forced decodes."""
    length, forced = (40, 4) if s.is_smoke else (300, 16)
    ids = np.random.default_rng(3).integers(0, shape.vocab, length + forced, np.int32)
    want = reference(torch.from_numpy(ids).long()[None].to(s.device)).logits[0].float()
    off = []
    with opened(s, shape, *PLAIN, folder=folder) as engine:
        whole = _prompt(engine, ids[:length], [length])
        chunked = _prompt(engine, ids[:length], [length // 3, length - length // 3])
        decoded = _forced(engine, ids[length:], length)
    found = {
        "prefill": (whole, want[:length]),
        "prefill in chunks": (chunked, want[:length]),
        "chunked beside whole": (chunked, whole),
        "forced decodes": (decoded, want[length:]),
    }
    for what, (got, exact) in found.items():
        error, row = relative(got, exact), _median_row(got, exact)
        # rounding may pick another expert for a token if two scores are nearly equal
        is_ok = (row if shape.experts else error) <= BOUND
        s.add(model=shape.name, what=what, error=error, median_row=row, ok=is_ok)
        off += [] if is_ok else [f"{shape.name} {what}"]
    return off


def _median_row(got: Tensor, want: Tensor) -> float:
    errors = (got - want).double().norm(dim=-1) / want.double().norm(dim=-1)
    return float(errors.median())


def _prompt(engine: Engine, ids: Any, counts: list[int]) -> Tensor:
    """float32 logits of all positions of a prompt that is computed in steps of `counts`."""
    enter, parts, at = engine.enter(1, len(ids) + 64), [], 0
    for count in counts:
        tokens = ids[at : at + count]
        item = Item("0", 0, at, count, tokens, at + count == len(ids), hidden_states=True)
        plan = replace(enter, items=(item,)) if at == 0 else StepPlan(1, (item,))
        step = engine.runner.forward(plan)
        engine.runner.sample(step, {})
        assert step.hidden_TD is not None
        parts.append(engine.runner.model.logits(step.hidden_TD).float())
        engine.runner.read(step)
        at += count
    return torch.cat(parts)


def _forced(engine: Engine, ids: Any, start: int) -> Tensor:
    """Logits of decode steps whose input tokens are `ids`."""
    rows = []
    for index, token in enumerate(ids.tolist()):
        engine.runner.tables.next_token[0] = token
        item = Item("0", 0, start + index, 1, None, True)
        step = engine.runner.forward(StepPlan(index, (item,)))
        assert step.logits_RV is not None
        rows.append(step.logits_RV[:1].float().clone())
        engine.runner.sample(step, {})
        engine.runner.read(step)
    return torch.cat(rows)


def _tokens(s: Session, shape: Shape, folder: Path) -> list[str]:
    """Greedy tokens of some requests, with and without overlap and graphs."""
    draw, count = np.random.default_rng(4), 4 if s.is_smoke else 12
    longest, output = (60, 6) if s.is_smoke else (400, 24)
    prompts = [draw.integers(0, shape.vocab, n) for n in draw.integers(1, longest, count)]
    prompts.append(np.concatenate([prompts[0], prompts[1]]))
    work = [BenchRequest(prompt.astype(np.int32), output) for prompt in prompts]
    found: dict[str, list[list[int]]] = {}
    for way, flags in [("", ()), *list(WAYS.items())[: 2 if s.quick else None]]:
        with opened(s, shape, *PLAIN, *flags, folder=folder) as engine:
            found[way] = drive(engine, work).tokens
            if not way:  # all prompts are cached by now
                found["prefix hit"] = drive(engine, work).tokens
    off = []
    for way, tokens in found.items():
        if not way:
            continue
        same = sum(a == b for a, b in zip(tokens, found[""], strict=True))
        s.add(
            model=shape.name,
            what=f"tokens, {way}",
            same=same,
            of=len(work),
            ok=same == len(work),
        )
        if same < len(work):
            off.append(f"{shape.name} tokens with {way}")
    return off

"""The worker of stage 6: runs one case of transformers and prints a line of JSON for each
result."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gpu.requests import requests
from gpu.roofline import SHAPES, TINY, Shape
from gpu.workers import say


def work(given: dict[str, Any]) -> None:
    """Run the given case."""
    way, name = given["case"].split()
    is_smoke, device = given["is_smoke"], torch.device(given["device"])
    shape = TINY[name] if is_smoke else SHAPES[name]
    if way == "batch":
        _batch(_model(shape, device), shape, is_smoke)
    else:
        _single(_model(shape, device), shape, way == "static", is_smoke)


def _model(shape: Shape, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


def _say(**row: Any) -> None:
    say(hf=transformers.__version__, **row)


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def _single(model: Any, shape: Shape, is_static: bool, is_smoke: bool) -> None:
    """Milliseconds a token after 1,024 tokens: the difference of a long and a short answer."""
    context, short, long = (16, 2, 6) if is_smoke else (1024, 8, 136)
    for batch in (1,) if is_static or is_smoke else (1, 64):
        ids = torch.randint(0, shape.vocab, (batch, context), device=model.device)
        spent: dict[int, float] = {}
        for count in (short, long, short, long):  # the first two runs compile
            config = GenerationConfig(
                max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
                cache_implementation="static" if is_static else None,
            )  # fmt: skip
            _wait(model)
            began_s = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            _wait(model)
            spent[count] = time.perf_counter() - began_s
        ms = 1e3 * (spent[long] - spent[short]) / (long - short)
        what = "generate, static cache" if is_static else "generate"
        _say(
            what=what, model=shape.name, batch=batch, context=context, ms=ms, tok_s=1e3 * batch / ms
        )


@torch.no_grad()  # the manager's thread cannot use tensors of inference mode
def _batch(model: Any, shape: Shape, is_smoke: bool) -> None:
    """The requests of stage 5 with transformers' continuous batching."""
    work = requests(shape.vocab, *((6, 4, 20) if is_smoke else (256, 100, 1024)))
    config = GenerationConfig(
        max_new_tokens=max(w.output for w in work), do_sample=False, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    model.generation_config = config
    manager = model.init_continuous_batching(generation_config=config)
    if hasattr(manager, "warmup"):  # captures its graphs
        with contextlib.suppress(NotImplementedError):
            manager.warmup()
    manager.start()
    try:
        _drive(manager, [(w.ids.tolist(), 3) for w in work[:4]])
        began_s = time.perf_counter()
        num_out = _drive(manager, [(w.ids.tolist(), w.output) for w in work])
        seconds = time.perf_counter() - began_s
    finally:
        manager.stop(block=True)
    _say(
        what="generate_batch", model=shape.name, requests=len(work), out=num_out,
        wanted=sum(w.output for w in work), seconds=seconds, out_tok_s=num_out / seconds,
    )  # fmt: skip


def _drive(manager: Any, asked: list[tuple[list[int], int]]) -> int:
    """Output tokens. It uses the manager, because generate_batch takes one length for all."""
    num_out, left = 0, len(asked)
    for ids, output in asked:
        manager.add_request(ids, max_new_tokens=output)
    while left:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            left -= 1
            num_out += len(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError(f"the manager stopped with {left} requests left")
    return num_out

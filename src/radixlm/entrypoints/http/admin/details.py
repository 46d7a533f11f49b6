"""/server_details: what the server view of the page shows beside /server_info."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm import __version__
from radixlm.arch.spec import Decoder
from radixlm.base.system_memory import system_memory
from radixlm.config.option import options
from radixlm.config.server_config import ServerConfig, flat
from radixlm.entrypoints.check_env import PACKAGES, processor
from radixlm.entrypoints.http.errors import json_response
from radixlm.entrypoints.http.state import ServerState, state_of

router = APIRouter(tags=["info"])

_MAX_HEADER_BYTES = 100 << 20
# the first that occurs in the name of a tensor of a checkpoint names its kind
_KINDS = {
    "norm": ("norm", "ln_"),
    "head": ("lm_head", "output.weight", "score."),
    "embedding": ("embed", "wte", "wpe", "token_embd"),
    "experts": ("expert", "block_sparse_moe"),
    "media": ("visual", "vision", "audio", "image"),
    "attention": ("attn", "attention", "mixer", "conv", "mamba"),
    "feed-forward": ("mlp", "ffn", "feed_forward", "fc1", "fc2"),
}


@router.get("/server_details")
async def server_details(request: Request) -> Response:
    """Options with their reasons, the model in figures, the machine, versions of packages."""
    state = state_of(request)
    stored, machine, packages = await asyncio.to_thread(_read, state.info.folder)
    return json_response(
        {
            "version": __version__,
            "options": [*_options(state.config)],
            "model": _model(state) | {"stored": stored},
            "machine": machine,
            "packages": packages,
        }
    )


def _read(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any], dict[str, str]]:
    """What files tell."""
    return stored_weights(folder), _machine(), _packages()


def _options(config: ServerConfig) -> Iterator[dict[str, Any]]:
    """Every option. ``was`` and ``reason``: where the server changed it; secrets are "***"."""
    values, defaults = flat(config), flat(ServerConfig())
    for name, option in options().items():
        was, reason = config.reasons.get(name, (None, None))
        yield {
            "name": name,
            "flag": option.dashed,
            "group": option.group,
            "value": values[name],
            "is_default": values[name] == defaults[name],
            "is_given": name in config.given,
            "was": was,
            "reason": reason,
        }


def _model(state: ServerState) -> dict[str, Any]:
    """The model in figures; its layers by what they are made of."""
    decoder, info = state.info.decoder, state.info
    return {
        "name": state.model_name,
        "architecture": info.architecture,
        "type": info.model_type,
        "context_len": state.intake.facts.context_len,
        "vocab": decoder.vocab,
        "layers": len(getattr(decoder, "blocks", ())),
        "layer_kinds": layer_kinds(decoder),
        "dim": getattr(decoder, "dim", None),
        "is_tied": getattr(decoder, "tied", None),
        "is_generation": info.is_generation,
        "has_template": state.template is not None,
        "tool_call_parser": state.tool_format,
        "reasoning_parser": state.reasoning_format,
        "modalities": sorted(state.media.kinds) if state.media is not None else [],
    }


def layer_kinds(decoder: Decoder) -> list[dict[str, Any]]:
    """Rows of equal layers: their number and the sizes of mixer and feed-forward."""
    rows: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for block in getattr(decoder, "blocks", ()):
        row: dict[str, Any] = {}
        for part, names in (
            (block.mixer, ("heads", "kv_heads", "head_dim", "window", "kv_rank", "state")),
            (block.ffn, ("inner", "experts", "top_k")),
        ):
            key = "mixer" if part is block.mixer else "ffn"
            row[key] = type(part).__name__ if part is not None else None
            row |= {n: getattr(part, n) for n in names if getattr(part, n, 0)}
        rows[tuple(row.items())] += 1
    return [{"layers": count, **dict(row)} for row, count in rows.items()]


def stored_weights(folder: Path) -> dict[str, Any] | None:
    """Tensors, parameters and bytes of the checkpoint's safetensors files, by kind and by dtype;
    None where it has none."""
    kinds: dict[str, int] = defaultdict(int)
    dtypes: dict[str, int] = defaultdict(int)
    num_tensors = num_params = 0
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if not isinstance(entry, dict) or "data_offsets" not in entry:
                continue
            begin, end = entry["data_offsets"]
            kinds[kind_of(name)] += end - begin
            dtypes[str(entry["dtype"])] += end - begin
            num_tensors += 1
            count = 1
            for length in entry["shape"]:
                count *= length
            num_params += count
    if not num_tensors:
        return None
    return {
        "tensors": num_tensors,
        "parameters": num_params,
        "bytes": sum(kinds.values()),
        "bytes_by_kind": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "bytes_by_dtype": dict(sorted(dtypes.items(), key=lambda pair: -pair[1])),
    }


def _header(path: Path) -> Mapping[str, Any]:
    """The JSON header of a safetensors file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, struct.error):
        return {}
    return found if isinstance(found, dict) else {}


def kind_of(name: str) -> str:
    """The kind of a tensor by its name in a checkpoint."""
    low = name.lower()
    return next((kind for kind, marks in _KINDS.items() if any(m in low for m in marks)), "other")


def _machine() -> dict[str, Any]:
    memory = system_memory()
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""Routes about the model, the options and the load of the server."""

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from radixlm import __version__
from radixlm.base.errors import InvalidRequest, RequestError
from radixlm.config.server_config import flat
from radixlm.engine.located import tokenizer_folder
from radixlm.entrypoints.http import ui
from radixlm.entrypoints.http.errors import is_anthropic, json_response
from radixlm.entrypoints.http.resume import known_digest
from radixlm.entrypoints.http.state import ServerState, state_of
from radixlm.kv_events.options import server_facts as kv_events_facts
from radixlm.lora.registry import Loaded
from radixlm.text.chat import prompt_digest
from radixlm.wire.replies import GRAPH_KINDS, DraftTotals, LoadReport

router = APIRouter(tags=["info"])
OWNER = "sglang"  # clients of the reference check it
_PARTS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


@router.get("/")
async def root(request: Request) -> Response:
    """The name and version of the server; browsers are sent to the page at /ui/."""
    serve = state_of(request).config.serve
    if not serve.disable_ui and ui.wants_page("/", request.headers.get("accept", "")):
        return ui.page(request, serve)
    return PlainTextResponse(f"RadixLM {__version__} is running\n")


@router.head("/", include_in_schema=False)
async def root_head() -> Response:
    return Response()


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(request: Request) -> Response:
    """The model and its tokenizer."""
    state = state_of(request)
    serve = state.config.serve
    modalities = state.media.kinds if state.media is not None else ()
    return json_response(
        {
            **_paths(state),
            "served_model_name": state.model_name,
            "is_generation": state.info.is_generation,
            "preferred_sampling_params": serve.preferred_sampling_params,
            "weight_version": state.weight_version,
            "model_type": state.info.model_type,
            "architectures": [state.info.architecture],
            "max_context_length": state.intake.facts.context_len,
            "vocab_size": state.info.decoder.vocab,
            "has_image_understanding": "image" in modalities,
            "has_audio_understanding": "audio" in modalities,
            "tool_call_parser": state.tool_format,
            "reasoning_parser": state.reasoning_format,
            "has_score_choices": True,
        }
    )


def _paths(state: ServerState) -> dict[str, str]:
    """Where clients on this machine find model and tokenizer: of a bundled model its folder, of
    one that was given by name the name; after an update from disk what was asked for."""
    model, updated = state.config.model, state.intake.weights.model_path
    path = model.model_path
    is_named = "model_path" in state.config.located
    if path is None or not (is_named or Path(path).expanduser().exists()):
        path = str(state.info.folder.resolve())
    tokenizer = model.tokenizer_path
    same = tokenizer in (None, model.model_path)
    return {"model_path": updated or path, "tokenizer_path": path if same else str(tokenizer)}


@router.get("/version")
async def version() -> Response:
    """The version of RadixLM."""
    return json_response({"version": __version__})


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """All options, and the state of the engine."""
    state = state_of(request)
    return json_response(await server_facts(state))


async def server_facts(state: ServerState) -> dict[str, Any]:
    """The body of /get_server_info."""
    intake = state.intake
    internal: list[dict[str, Any]] = []
    if intake.ready.is_set():
        with contextlib.suppress(RequestError):
            internal = [dict(reply.data or {}) for reply in await intake.control_each("info")]
    own = {
        "load": _load(intake.load)["num_reqs"],
        "startup_time": startup_time(state),
        "effective_max_running_requests_per_dp": intake.engine_facts.get("max_running", 0),
    }
    status = "ready" if intake.ready.is_set() else "starting"
    options = flat(state.config) | _paths(state)
    return options | {
        "status": status,
        "released_memory": intake.occupation.released,
        "weights": intake.weights.facts(),
        "max_total_num_tokens": intake.engine_facts.get("max_total_num_tokens", 0),
        "max_req_input_len": intake.facts.context_len - 1,
        "startup_time": startup_time(state),
        "internal_states": [options | each | own for each in internal or [{}]],
        "engine": intake.engine_facts,
        "version": __version__,
        "resume_digest": await known_digest(state),
        "prompt_digest": await _prompt_digest(state),
        "kv_events": kv_events_facts(
            state.config.observe.kv_events_config,
            state.config.parallel.dp_size,
            intake.engine_facts.get("kv_page_size"),
        ),
        "replicas": [replica.facts | {"is_ready": replica.is_ready} for replica in intake.replicas],
        "uptime_s": round(time.monotonic() - state.began_s, 3),
    }


def startup_time(state: ServerState) -> dict[str, Any]:
    """Seconds of parts of the start, under SGLang's names: the weights; what the engine did after
    them, mostly making the KV cache; both; recording graphs, of all kinds of steps; and until the
    server was ready."""
    facts = state.intake.engine_facts
    graphs = dict.fromkeys(GRAPH_KINDS, 0.0)
    graphs["decode"] = float(facts.get("graph_seconds", 0.0))
    load_s, engine_s = (
        float(facts.get("load_seconds", 0.0)),
        float(facts.get("engine_seconds", 0.0)),
    )
    return {
        "load_weight": load_s,
        "kv_cache_allocation": max(0.0, engine_s - load_s),
        "scheduler_e2e": engine_s,
        "cuda_graph": graphs,
        "tokenizer_e2e": state.ready_after_s,
    }


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(request: Request) -> Response:
    """The label of the weights."""
    return json_response({"weight_version": state_of(request).weight_version})


class _PromptDigest:
    """``prompt_digest`` of this server, computed once."""

    def __init__(self, value: str) -> None:
        self.value = value


async def _prompt_digest(state: ServerState) -> str | None:
    """What a gateway compares before it sends token ids beside messages."""
    template = state.template
    if template is None or state.tokenizer is None:
        return None
    known = state.extras.get(_PromptDigest)
    if known is None:
        folder = tokenizer_folder(state.config, state.info.folder)
        mode = state.config.model.tokenizer_mode
        value = await asyncio.to_thread(prompt_digest, folder, mode, template)
        known = state.extras[_PromptDigest] = _PromptDigest(value)
    return str(known.value)


def _load(load: LoadReport, rank: int = 0) -> dict[str, Any]:
    return {
        "dp_rank": rank,
        "num_reqs": load.num_running + load.num_waiting,
        "num_waiting_reqs": load.num_waiting,
        "num_tokens": load.num_used_tokens,
    }


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """The load of each replica."""
    replicas = state_of(request).intake.replicas
    return json_response([_load(replica.load, replica.index) for replica in replicas])


@router.get("/v1/loads")
async def loads(
    request: Request, dp_rank: int | None = None, include: str = "all", format: str = "json"
) -> Response:
    """The load of each replica, in parts; ``format`` json or prometheus."""
    parts = {part.strip() for part in include.split(",") if part.strip()}
    unknown = parts - set(_PARTS)
    if unknown:
        raise InvalidRequest(f"include: {sorted(unknown)[0]!r:.80} is none of {_PARTS}", "include")
    intake = state_of(request).intake
    replicas = intake.replicas
    if dp_rank is not None and not 0 <= dp_rank < len(replicas):
        raise InvalidRequest(f"dp_rank must be below --dp-size {len(replicas)}", "dp_rank")
    if format not in ("json", "prometheus"):
        raise InvalidRequest("format must be json or prometheus", "format")
    by_rank = {
        r.index: _parts(r.load, parts, intake.adapters.counts(r.rids))
        for r in replicas
        if dp_rank in (None, r.index)
    }
    if format == "prometheus":
        lines = [
            f'sglang:load_{name}{{dp_rank="{rank}"}} {float(value):g}'
            for rank, values in by_rank.items()
            for name, value in values.items()
        ]
        return PlainTextResponse("\n".join(lines) + "\n")
    report = intake.load
    total = {
        "total_running_reqs": report.num_running,
        "total_waiting_reqs": report.num_waiting,
        "total_reqs": report.num_running + report.num_waiting,
    }
    body = {"timestamp": time.time(), "version": __version__, "dp_rank_count": len(replicas)}
    shown = [{"dp_rank": rank} | values for rank, values in by_rank.items()]
    return json_response(body | {"loads": shown, "aggregate": total})


def accept_rate(load: LoadReport) -> float:
    """The share of drafted tokens that was accepted, since the start."""
    drafts = load.drafts or DraftTotals()
    return drafts.num_accepted / max(1, drafts.num_drafted)


def _parts(load: LoadReport, parts: set[str], lora: dict[str, float]) -> dict[str, float]:
    total = max(load.num_total_tokens, 1)
    by_part: dict[str, dict[str, float]] = {
        "core": {
            "num_running_reqs": load.num_running,
            "num_waiting_reqs": load.num_waiting,
            "num_total_reqs": load.num_running + load.num_waiting,
            "gen_throughput": load.gen_throughput,
            "cache_hit_rate": load.cache_hit_rate,
        },
        "memory": {
            "num_used_tokens": load.num_used_tokens,
            "max_total_num_tokens": load.num_total_tokens,
            "token_usage": load.num_used_tokens / total,
        },
        "spec": {
            "spec_accept_length": load.spec_accept_length,
            "spec_accept_rate": accept_rate(load),
        },
        "lora": lora,
        "queues": {
            "num_retracted_reqs": load.num_retracted,
            "num_paused_reqs": load.num_paused,
            "num_grammar_queue_reqs": load.num_grammar_queue,
        },
    }
    chosen = by_part if "all" in parts else {k: v for k, v in by_part.items() if k in parts}
    return {name: value for part in chosen.values() for name, value in part.items()}


def _card(state: ServerState, adapter: Loaded | None = None) -> dict[str, Any]:
    return {
        "id": adapter.name if adapter else state.model_name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": OWNER,
        "root": adapter.path if adapter else state.model_name,
        "parent": state.model_name if adapter else None,
        "max_model_len": None if adapter else state.intake.facts.context_len,
    }


def _anthropic_card(state: ServerState, adapter: Loaded | None = None) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(state.started_s), UTC)
    name = adapter.name if adapter else state.model_name
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": state.intake.facts.context_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The models that are served: the base model, then its adapters."""
    state = state_of(request)
    make = _anthropic_card if is_anthropic(request) else _card
    cards = [make(state, one) for one in (None, *state.intake.adapters.entries)]
    if is_anthropic(request):
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return json_response({"data": cards} | ends)
    return json_response({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """One model or adapter; 404 model_not_found. Without a name, all of them."""
    if not model:
        return await models(request)
    state = state_of(request)
    adapter = None
    if not state.has_model(model):
        name = state.adapter_of(model)
        adapter = next((one for one in state.intake.adapters.entries if one.name == name), None)
        if adapter is None:
            raise state.no_model(model)
    make = _anthropic_card if is_anthropic(request) else _card
    return json_response(make(state, adapter))

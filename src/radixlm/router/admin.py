"""Routes about the gateway itself: health, readiness, models, parsing of texts."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson

from radixlm.base.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TransferError,
    Unauthorized,
)
from radixlm.base.lazy import load
from radixlm.router.answer import Answer, is_anthropic, json_answer
from radixlm.router.call import Call
from radixlm.router.worker import Worker, WorkerType

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

_SECRET = re.compile("key|secret|password|token$|credential", re.IGNORECASE)
_TIMEOUT_S = 5.0
PARSERS = {
    "qwen_coder": "qwen3_coder", "llama": "llama3", "deepseek": "deepseekv3", "kimik2": "kimi_k2",
    "glm45_moe": "glm45", "glm47_moe": "glm47", "minimax_m2": "minimax-m2", "base": "qwen3",
    "deepseek_r1": "deepseek-r1", "qwen3_thinking": "qwen3-thinking",
}  # fmt: skip
"""sglang-router's names of parsers -> ours."""


def attach(gateway: Gateway) -> None:
    """Register the routes."""
    admin, add = Admin(gateway), gateway.routes.add
    for path in ("/liveness", "/health"):
        add("GET", path, admin.alive, "open")
    for path in ("/readiness", "/ready"):
        add("GET", path, admin.ready, "open")
    add("GET", "/health_generate", admin.health_generate, "open")
    add("GET", "/v1/models", admin.models, "open")
    add("GET", "/v1/models/{model:path}", admin.model, "open")
    for path in ("/get_model_info", "/model_info"):
        add("GET", path, admin.model_info, "open")
    for path in ("/get_server_info", "/server_info"):
        add("GET", path, admin.server_info, "open")
    add("POST", "/parse/function_call", admin.parse_function_call)
    add("POST", "/parse/reasoning", admin.parse_reasoning)
    for method in ("GET", "POST"):
        for path in ("/ha/{a}", "/ha/{a}/{b}"):
            add(method, path, _no_mesh)
        add(method, "/wasm", _no_wasm)
    add("DELETE", "/wasm/{id}", _no_wasm)


def _shown(call: Call, card: dict[str, Any]) -> dict[str, Any]:
    """A model's card in the form that the client reads: Anthropic's, else OpenAI's."""
    if not is_anthropic(call):
        return card
    created = datetime.fromtimestamp(card.get("created", 0), UTC).isoformat()
    shown = {"id": card["id"], "type": "model", "display_name": card["id"]}
    shown["created_at"] = created.replace("+00:00", "Z")
    if card.get("max_model_len") is not None:
        shown["max_input_tokens"] = card["max_model_len"]
    return shown


async def _no_mesh(call: Call) -> Answer:
    return json_answer({"error": "mesh not enabled"}, 503)


async def _no_wasm(call: Call) -> Answer:
    return json_answer({"error": "WebAssembly plug-ins are not built"}, 503)


class Admin:
    def __init__(self, gateway: Gateway) -> None:
        assert gateway.auth  # made before the routes
        self.gateway, self.registry, self.options = gateway, gateway.registry, gateway.options
        self.auth = gateway.auth

    async def alive(self, call: Call) -> Answer:
        """200, also without a worker."""
        return Answer(200, b"OK", "text/plain")

    async def ready(self, call: Call) -> Answer:
        """200 if a request could be served now: workers that answer and whose breaker is closed."""
        workers = list(self.registry)
        is_pd = self.options.pd_disaggregation and not self.options.enable_igw
        needed: tuple[WorkerType, ...] = ("prefill", "decode") if is_pd else ()
        able = [one for one in workers if one.is_available]
        is_ready = bool(able) and all(any(w.worker_type == kind for w in able) for kind in needed)
        is_ready |= any(one.computes_alone for one in able)
        if self.gateway.is_draining:
            return json_answer({"status": "not ready", "reason": "draining"}, 503)
        if not is_ready:
            body = {"status": "not ready", "reason": "insufficient healthy workers"}
            return json_answer(body, 503)
        counts = {"healthy_workers": len(able), "total_workers": len(workers)}
        return json_answer({"status": "ready", **counts})

    async def health_generate(self, call: Call) -> Answer:
        """Whether any worker is healthy; generates nothing."""
        if any(one.is_available for one in self.registry):
            return Answer(200, b"At least one router has healthy workers", "text/plain")
        return Answer(503, b"No routers with healthy workers available", "text/plain")

    async def models(self, call: Call) -> Answer:
        """Models and adapters of the workers that are available."""
        cards = [_shown(call, card) for card in self._cards().values()]
        if not cards:
            raise Overloaded("No models available: no worker is ready", retry_after_s=1)
        if is_anthropic(call):
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
            return json_answer({"data": cards} | ends)
        return json_answer({"object": "list", "data": cards})

    async def model(self, call: Call) -> Answer:
        """One of them."""
        name = unquote(call.path_args["model"])
        if name not in (cards := self._cards()):
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", "model")
        return json_answer(_shown(call, cards[name]))

    def _cards(self) -> dict[str, dict[str, Any]]:
        cards: dict[str, dict[str, Any]] = {}
        for worker in self.registry:
            told = worker.facts.get("cards", ()) if worker.is_available else ()
            for card in told:
                cards.setdefault(card["id"], {**card, "object": "model", "owned_by": "local"})
            if worker.is_available and worker.model_id not in (None, "unknown", *cards):
                named = {"id": worker.model_id, "object": "model", "owned_by": "local"}
                cards[worker.model_id] = named
        return cards

    async def model_info(self, call: Call) -> Answer:
        """What the first available worker answers."""
        worker, body = await self._first("/get_model_info", "/model_info")
        if worker is None:
            raise Overloaded("no worker is ready", retry_after_s=1)
        return json_answer(body)

    async def server_info(self, call: Call) -> Answer:
        """Counts of the gateway, and what the first worker tells of itself, without secrets: the
        counts to all, the rest to those who may ask a worker."""
        body: dict[str, Any] = {}
        with contextlib.suppress(Unauthorized):
            self.auth(call, "key")
            _, body = await self._first("/get_server_info", "/server_info")
        counts = {"routers_count": 1, "workers_count": len(self.registry)}
        return json_answer(_without_secrets(body) | {"router_manager": True, **counts})

    async def _first(self, *targets: str) -> tuple[Worker | None, dict[str, Any]]:
        """The first worker whose answer to one of ``targets`` is a JSON object."""
        for worker in self.registry:
            for target in targets if worker.is_available else ():
                try:
                    response = await self.registry.fetch(
                        worker.url, "GET", target, timeout_s=_TIMEOUT_S, api_key=worker.api_key
                    )
                    body = orjson.loads(response.body) if response.status == 200 else None
                except (TransferError, OSError, TimeoutError, orjson.JSONDecodeError):
                    continue
                if isinstance(body, dict):
                    return worker, body
        return None, {}

    async def parse_function_call(self, call: Call) -> Answer:
        """The tool calls in a text: {remaining_text, tool_calls, success}."""
        names = load("radixlm.text.tools.registry:NAMES")
        name = _chosen(call, "tool_call_parser", self.options.tool_call_parser, names)
        tools = call.fields.get("tools") or []
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise InvalidRequest("tools must be a list of objects", "tools")
        specs = load("radixlm.text.tools.base:tool_specs")(tools)
        parser = load("radixlm.text.tools.registry:create")(name, specs)
        text, found = load("radixlm.text.tools.base:parse_all")(parser, _text(call))
        calls = [{"function": {"name": one.name, "arguments": one.arguments}} for one in found]
        return json_answer({"remaining_text": text, "tool_calls": calls, "success": True})

    async def parse_reasoning(self, call: Call) -> Answer:
        """The reasoning in a text: {normal_text, reasoning_text, success}."""
        names = load("radixlm.text.reasoning.registry:NAMES")
        name = _chosen(call, "reasoning_parser", self.options.reasoning_parser, names)
        parser = load("radixlm.text.reasoning.registry:create")(name)
        reasoning, text = load("radixlm.text.reasoning.base:split_all")(parser, _text(call))
        return json_answer({"normal_text": text, "reasoning_text": reasoning, "success": True})


def _without_secrets(value: Any) -> Any:
    """JSON without the fields, at any depth, that are called like keys or passwords."""
    if isinstance(value, dict):
        return {k: _without_secrets(v) for k, v in value.items() if not _SECRET.search(k)}
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)


def _text(call: Call) -> str:
    text = call.fields.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"text cannot be {text!r:.80}: a string works", "text")
    return text


def _chosen(call: Call, field: str, default: str | None, names: Any) -> str:
    """The parser that the body names, or the flag."""
    name = call.fields.get(field) or default
    known = PARSERS.get(name, name) if isinstance(name, str) else None
    if known is None or known not in names:
        raise InvalidRequest(f"{field} {name!r:.80} is none of {', '.join(names)}", field)
    return known

"""Routes of the gateway's tokenizers: /v1/tokenize, /v1/detokenize, /v1/tokenizers."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from radixlm.base.errors import InvalidRequest, RadixError, TransferError
from radixlm.router.answer import Answer, error_answer, json_answer
from radixlm.router.call import Call
from radixlm.router.tokens import Tokens

if TYPE_CHECKING:
    from radixlm.router.app import Gateway
    from radixlm.router.gateway_tokenizer import GatewayTokenizer

WORKER_WAIT_S: Final = 30.0


class TokensApi:
    """Without a tokenizer of its own the gateway asks a worker to tokenize."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._pending: dict[str, dict[str, Any]] = {}  # id -> status, also of those that failed

    async def tokenize(self, call: Call) -> Answer:
        """POST /v1/tokenize {"model"?, "prompt": text or list of texts}."""
        tokenizer = self._tokens.of(call)
        prompt: Any = call.fields.get("prompt")
        if tokenizer is None or (prompt is None and call.fields.get("messages") is not None):
            return await self._by_worker(call)
        adds = call.fields.get("add_special_tokens") is not False
        texts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest('prompt must be a text or a list of texts: "hello"', "prompt")
        rows = await asyncio.to_thread(tokenizer.tokenizer.encode_batch, texts, adds)
        if isinstance(prompt, list):
            counts, chars = [len(row) for row in rows], [len(text) for text in texts]
            return json_answer({"tokens": rows, "count": counts, "char_count": chars})
        return json_answer({"tokens": rows[0], "count": len(rows[0]), "char_count": len(texts[0])})

    async def detokenize(self, call: Call) -> Answer:
        """POST /v1/detokenize {"model"?, "tokens": ids or lists of ids, "skip_special_tokens"?}."""
        tokenizer = self._tokens.of(call)
        if tokenizer is None:
            return await self._by_worker(call)
        tokens: Any = call.fields.get("tokens")
        is_nested = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
        rows: list[Any] = tokens if is_nested else [tokens]
        vocab = tokenizer.tokenizer.vocab_size
        for row in rows:
            is_list = isinstance(row, list)
            if not is_list or not all(type(i) is int and 0 <= i < vocab for i in row):
                raise InvalidRequest(f"tokens must be ids from 0 to {vocab - 1}: [1, 2]", "tokens")
        skips = call.fields.get("skip_special_tokens") is not False
        texts = [await asyncio.to_thread(tokenizer.tokenizer.decode, r, skips) for r in rows]
        return json_answer({"text": texts if is_nested else texts[0]})

    async def listed(self, call: Call) -> Answer:
        """GET /v1/tokenizers."""
        return json_answer({"tokenizers": [_card(one) for one in self._all()]})

    async def shown(self, call: Call) -> Answer:
        """GET /v1/tokenizers/{id}, by id or name."""
        found = self._find(call.path_args["id"])
        return json_answer(_card(found)) if found else _unknown(call.path_args["id"])

    async def status(self, call: Call) -> Answer:
        """GET /v1/tokenizers/{id}/status: pending, completed or failed."""
        name = call.path_args["id"]
        if found := self._find(name):
            done = {"id": found.id, "status": "completed", "message": "the tokenizer is ready"}
            return json_answer(done | {"vocab_size": found.tokenizer.vocab_size})
        return json_answer(self._pending[name]) if name in self._pending else _unknown(name)

    async def add(self, call: Call) -> Answer:
        """POST /v1/tokenizers {"name", "source": folder, "chat_template_path"?}; 202."""
        name, source = (call.fields.get(key) for key in ("name", "source"))
        template = call.fields.get("chat_template_path")
        if not isinstance(name, str) or not isinstance(source, str) or not name or not source:
            raise InvalidRequest(
                'name and source are required: {"name": "m", "source": "/models/m"}'
            )
        if template is not None and not isinstance(template, str):
            raise InvalidRequest("chat_template_path must be a path", "chat_template_path")
        if name in self._tokens.by_name:
            message = f"a tokenizer {name!r:.100} is there already; delete it first"
            return error_answer(409, message, "tokenizer_exists", param="name")
        if len(self._pending) > 1000:
            self._pending.clear()
        key = str(uuid.uuid4())
        state = self._pending[key] = {
            "id": key,
            "status": "pending",
            "message": f"reading {source}",
        }
        self._tokens.gateway.spawn(self._read(key, name, source, template))
        return json_answer(state, 202)

    async def remove(self, call: Call) -> Answer:
        """DELETE /v1/tokenizers/{id}."""
        found = self._find(call.path_args["id"])
        if found is None:
            return _unknown(call.path_args["id"])
        del self._tokens.by_name[found.name]
        return json_answer({"success": True, "message": f"tokenizer {found.name} is removed"})

    async def _read(self, key: str, name: str, source: str, template: str | None) -> None:
        try:
            await self._tokens.add(name, source, template)
            self._tokens.by_name[name].id = key
            self._pending.pop(key, None)
        except (RadixError, OSError, ValueError) as error:
            self._pending[key] = {"id": key, "status": "failed", "message": str(error)}

    async def _by_worker(self, call: Call) -> Answer:
        gateway = self._tokens.gateway
        for worker in gateway.registry.pool(call.model, "regular"):
            try:
                found = await gateway.upstream.fetch(
                    worker.url, "POST", call.path, body=call.body, api_key=worker.api_key,
                    headers=[(b"content-type", b"application/json")], timeout_s=WORKER_WAIT_S,
                )  # fmt: skip
            except TransferError:
                continue
            return Answer(found.status, found.body)
        message = (
            "the gateway has no tokenizer and no worker: start it with --tokenizer-path FOLDER"
        )
        return error_answer(503, message, "no_tokenizer", kind="overloaded_error")

    def _all(self) -> list[GatewayTokenizer]:
        return list(self._tokens.by_name.values())

    def _find(self, name: str) -> GatewayTokenizer | None:
        wanted = unquote(name)
        return next((one for one in self._all() if wanted in (one.id, one.name)), None)


def _card(one: GatewayTokenizer) -> dict[str, Any]:
    vocab = one.tokenizer.vocab_size
    return {"id": one.id, "name": one.name, "source": one.source, "vocab_size": vocab}


def _unknown(name: str) -> Answer:
    return error_answer(404, f"no tokenizer {name!r:.100}", "tokenizer_not_found")


def attach(gateway: Gateway) -> None:
    """Prompts for policies, token ids for workers, routes of tokenizers."""
    tokens = gateway.tokens = Tokens(gateway)
    api, add = TokensApi(tokens), gateway.routes.add
    add("POST", "/v1/tokenize", api.tokenize, "key")
    add("POST", "/v1/detokenize", api.detokenize, "key")
    add("GET", "/v1/tokenizers", api.listed)
    add("POST", "/v1/tokenizers", api.add)
    add("GET", "/v1/tokenizers/{id}", api.shown)
    add("GET", "/v1/tokenizers/{id}/status", api.status)
    add("DELETE", "/v1/tokenizers/{id}", api.remove)
    gateway.dispatcher.prepare = tokens.prepare
    gateway.dispatcher.splices.append(tokens.splice)
    gateway.registry.listen(tokens.on_worker)
    gateway.on_start.append(tokens.start)

"""Routes that ask every worker: flush, loads, profiles, weights, adapters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from radixlm.base.errors import NotFound, Overloaded, TransferError
from radixlm.router.answer import Access, Answer, json_answer
from radixlm.router.call import Call, Headers
from radixlm.router.registry import Registry
from radixlm.router.worker import State, Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway

_ASK_S = 5.0
_WORK_S = 1800.0  # new weights may take their time

_ON_ALL = (
    "/pause_generation /continue_generation /set_internal_state "
    "/release_memory_occupation /resume_memory_occupation /update_weights_from_disk "
    "/init_weights_update_group /destroy_weights_update_group /begin_weight_update "
    "/end_weight_update /update_weights_from_distributed /update_weights_from_tensor "
    "/load_lora_adapter /unload_lora_adapter /v1/load_lora_adapter /v1/unload_lora_adapter "
    "/configure_logging /reset_prefix_cache /sleep /wake_up"
).split()


def attach(gateway: Gateway) -> None:
    """Register the routes."""
    spread, add = Spread(gateway.registry), gateway.routes.add
    add("POST", "/flush_cache", spread.flush_cache)
    add("GET", "/flush_cache", spread.flush_cache)
    add("GET", "/get_loads", spread.get_loads)
    add("GET", "/get_load", spread.get_load, "key")
    access: dict[str, Access] = {"/abort_request": "key"}
    for path in ("/start_profile", "/stop_profile"):
        add("POST", path, spread.profile)
    for path in (*_ON_ALL, "/abort_request"):
        add("POST", path, spread.on_all, access.get(path, "admin"))


class Spread:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def _ask(
        self,
        call: Call,
        method: str,
        target: str,
        timeout_s: float,
        body: bytes = b"",
        url: str = "",
    ) -> list[tuple[Worker, int, bytes]]:
        """(worker, status, body) of each server, ranks once, or only of that at ``url``; status 0
        and the reason where no answer came."""
        kept = (b"content-type", b"x-request-id")
        headers: Headers = [pair for pair in call.headers if pair[0] in kept]

        async def ask(worker: Worker) -> tuple[Worker, int, bytes]:
            key = worker.api_key
            try:
                response = await self.registry.fetch(
                    worker.url,
                    method,
                    target,
                    body=body,
                    headers=headers,
                    timeout_s=timeout_s,
                    api_key=key,
                )
            except (TransferError, OSError, TimeoutError) as error:
                return worker, 0, (str(error) or type(error).__name__).encode()
            return worker, response.status, response.body

        servers = {
            one.url: one
            for one in self.registry
            if one.state is not State.JOINING and url in ("", one.url)
        }
        return await asyncio.gather(*map(ask, servers.values()))

    async def flush_cache(self, call: Call) -> Answer:
        """POST /flush_cache of all workers; 206 where some failed."""
        asked = await self._ask(call, "POST", "/flush_cache", _WORK_S)
        good = [worker.url for worker, status, _ in asked if status == 200]
        bad = [
            {"worker": worker.url, "error": f"HTTP {status}" if status else why.decode()}
            for worker, status, why in asked
            if status != 200
        ]
        message = (
            f"Cache flush: {len(good)} succeeded, {len(bad)} failed"
            if bad
            else f"Successfully flushed cache on all {len(good)} HTTP workers"
        )
        counts = {"total_http_workers": len(asked), "total_workers": len(self.registry)}
        body: dict[str, Any] = {"status": "partial_success" if bad else "success"}
        body |= {"message": message, "workers_flushed": len(good), **counts}
        return json_answer(
            body | ({"successful": good, "failed": bad} if bad else {}), 206 if bad else 200
        )

    async def get_loads(self, call: Call) -> Answer:
        """Tokens that each worker's /get_load tells; -1 where it tells none."""
        loads = []
        for worker, status, body in await self._ask(call, "GET", "/get_load", _ASK_S):
            rows = _rows(body) if status == 200 else []
            told = [row["num_tokens"] for row in rows if isinstance(row.get("num_tokens"), int)]
            loads.append({"worker": worker.url, "load": sum(told) if rows else -1})
        return json_answer({"workers": loads})

    async def get_load(self, call: Call) -> Answer:
        """The rows of all workers' /get_load: for a gateway in front of this one."""
        asked = await self._ask(call, "GET", "/get_load", _ASK_S)
        return json_answer(
            [row for _, status, body in asked if status == 200 for row in _rows(body)]
        )

    async def on_all(self, call: Call) -> Answer:
        """The same request to all workers: the first answer where all are good, else the first
        that is not, with the worker's url before its message. An abort is not for workers that
        do not answer."""
        return await self._same_of_all(call, call.body)

    async def profile(self, call: Call) -> Answer:
        """POST /start_profile and /stop_profile: as ``on_all``; ``url`` names one worker."""
        fields = dict(call.fields)
        url = fields.pop("url", None)
        if url is None:
            return await self._same_of_all(call, call.body)
        if not isinstance(url, str) or not self.registry.find(url):
            raise NotFound(f"no worker has the url {url!r:.200}")
        return await self._same_of_all(call, orjson.dumps(fields), url.rstrip("/"))

    async def _same_of_all(self, call: Call, body: bytes, url: str = "") -> Answer:
        target = call.path + (f"?{call.query}" if call.query else "")
        is_abort = call.path == "/abort_request"
        limit_s = _ASK_S if is_abort else _WORK_S
        asked = await self._ask(call, "POST", target, limit_s, body, url)
        if not asked:
            raise Overloaded("no worker is ready", retry_after_s=1)
        if is_abort:
            asked = [one for one in asked if one[1]] or asked
        else:  # weights, adapters or the like are others now
            for one, _, _ in asked:
                self.registry.spawn(self.registry.learn(one))
        bad = [one for one in asked if not 200 <= one[1] < 300]
        worker, status, told = (bad or asked)[0]
        headers = [(b"x-radixlm-worker", worker.url.encode())]
        if not status:
            error = {"message": f"{worker.url}: {told.decode()}", "type": "overloaded_error"}
            return json_answer({"error": error | {"code": "worker_unreachable"}}, 503, headers)
        return Answer(status, told, headers=headers)


def _rows(body: bytes) -> list[dict[str, Any]]:
    """The objects of a JSON list."""
    try:
        rows = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

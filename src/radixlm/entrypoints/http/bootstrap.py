"""The bootstrap service of a prefill server, on --disaggregation-bootstrap-port: ranks register
where they listen, decode servers ask for it. Routes and fields are those of SGLang 0.5.2, with the
newer names of 0.5.23 beside them. To know where a rank listens is no access: that needs the secret.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from typing import Annotated, Any, Final

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field
from starlette.types import ASGIApp, Receive, Scope, Send

from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.errors import add_handlers, error_body, json_response
from radixlm.entrypoints.http.middleware import Limited
from radixlm.entrypoints.http.transport import read_body
from radixlm.entrypoints.http.uvicorn_protocol import Server
from radixlm.entrypoints.request_model import Body

MAX_ROOMS: Final = 1 << 16
MAX_PLACES: Final = 4096
MAX_BODY_BYTES: Final = 4 << 20
STALL_S: Final = 10.0
ROOM_S: Final = 120.0  # how long the replica of a room is remembered
Size = Annotated[int, Field(ge=1, le=4096)]
Rank = Annotated[int, Field(ge=0, le=4096)]
router = APIRouter()


class Route(Body):
    """PUT /route: a rank and where it listens."""

    role: str | None = None
    attn_tp_size: Size | None = None
    attn_tp_rank: Rank | None = None
    attn_cp_size: Size | None = None
    attn_cp_rank: Rank | None = None
    attn_dp_size: Size | None = None
    attn_dp_rank: Rank | None = None
    pp_size: Size = 1
    pp_rank: Rank = 0
    system_dp_size: Size = 1
    system_dp_rank: Rank = 0
    tp_size: Size | None = None  # of the form that the reference's nixl backend sends
    dp_size: Size | None = None
    engine_rank: Rank | None = None
    rank_ip: str
    rank_port: Annotated[int, Field(ge=1, le=65535)]
    page_size: Size | None = None
    kv_cache_dtype: str | None = None


class Registered:
    """What ranks have registered. ``sizes``: of the server, by the newer names."""

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}
        self.places: dict[tuple[int, int, int], tuple[str, int]] = {}  # by (dp, pp, tp) rank
        self.rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def put(self, route: Route) -> None:
        tp = route.attn_tp_size or route.tp_size or 1
        groups, group = route.attn_dp_size or route.dp_size or 1, route.attn_dp_rank or 0
        if route.system_dp_size > 1:
            groups, group = route.system_dp_size, route.system_dp_rank
        rank = route.attn_tp_rank
        if rank is None:
            rank = (route.engine_rank or 0) % tp
        place = group, route.pp_rank, rank
        if any(n >= size for n, size in zip(place, (groups, route.pp_size, tp), strict=True)):
            raise InvalidRequest(f"(dp, pp, tp) rank {place} of {(groups, route.pp_size, tp)}")
        if place not in self.places and len(self.places) >= MAX_PLACES:
            raise InvalidRequest(f"{MAX_PLACES} ranks have registered already")
        self.sizes = {
            "attn_tp_size": tp,
            "attn_cp_size": route.attn_cp_size or 1,
            "dp_size": groups,
            "pp_size": route.pp_size,
            "page_size": route.page_size,
            "kv_cache_dtype": route.kv_cache_dtype,
            "follow_bootstrap_room": True,
        }
        self.places[place] = route.rank_ip, route.rank_port

    @property
    def is_whole(self) -> bool:
        s = self.sizes
        return bool(s) and len(self.places) >= s["attn_tp_size"] * s["dp_size"] * s["pp_size"]

    def note_room(self, room: int, rank: int) -> None:
        now_s = time.monotonic()
        self.rooms[room] = rank, now_s
        self.rooms.move_to_end(room)
        while len(self.rooms) > MAX_ROOMS or now_s - next(iter(self.rooms.values()))[1] > ROOM_S:
            self.rooms.popitem(last=False)


class RoomRank(Body):
    """POST /register_dp_rank."""

    bootstrap_room: int
    dp_rank: Rank


class Rooms(Body):
    """POST /query_dp_ranks."""

    bootstrap_rooms: Annotated[list[int], Field(max_length=MAX_ROOMS)]


def _registered(request: Request) -> Registered:
    found = request.app.state.registered
    assert isinstance(found, Registered)
    return found


@router.put("/route")
async def put_route(request: Request) -> Response:
    """A rank registers; a later one of the same place replaces it."""
    _registered(request).put(await read_body(request, Route, any_type=True))
    return PlainTextResponse("OK")


@router.get("/route")
async def get_route(request: Request) -> Response:
    """The server's sizes (all arguments -1), or where one rank listens."""
    here, query = _registered(request), request.query_params
    tp_rank = _argument(query.get("engine_rank") or query.get("target_tp_rank"), "engine_rank")
    group = _argument(
        query.get("target_dp_group") or query.get("prefill_dp_rank"), "target_dp_group"
    )
    pp_rank = _argument(query.get("target_pp_rank", "-1"), "target_pp_rank")
    if tp_rank == group == -1 and pp_rank == -1:
        if not here.is_whole:
            return json_response(error_body("not all ranks have registered yet", 503), 503)
        sizes = here.sizes
        older = {
            "prefill_attn_tp_size": sizes["attn_tp_size"],
            "prefill_tp_size": sizes["attn_tp_size"],
            "prefill_dp_size": sizes["dp_size"],
            "prefill_pp_size": sizes["pp_size"],
        }
        return json_response(older | sizes)
    place = here.places.get((max(group, 0), max(pp_rank, 0), max(tp_rank, 0)))
    if place is None:
        return json_response(error_body("no such rank has registered", 404), 404)
    return json_response({"rank_ip": place[0], "rank_port": place[1]})


def _argument(text: str | None, name: str) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise InvalidRequest(f"{name}: {text!r:.40} is no number; -1 for all", name) from None


@router.post("/register_dp_rank")
async def register_dp_rank(request: Request) -> Response:
    """Which replica has the request of a room."""
    body = await read_body(request, RoomRank, any_type=True)
    _registered(request).note_room(body.bootstrap_room, body.dp_rank)
    return PlainTextResponse("OK")


@router.post("/query_dp_ranks")
async def query_dp_ranks(request: Request) -> Response:
    """The replicas of rooms that are known, by room as text."""
    body, rooms = await read_body(request, Rooms, any_type=True), _registered(request).rooms
    found = {str(r): rooms[r][0] for r in body.bootstrap_rooms if r in rooms}
    return json_response(found)


@router.get("/health")
async def health() -> Response:
    """200 while the service runs."""
    return PlainTextResponse("OK")


class _Bounded:
    """Refuses bodies beyond MAX_BODY_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, Limited(receive, MAX_BODY_BYTES, ""), send)


def bootstrap_app() -> FastAPI:
    """The service without a socket."""
    app = FastAPI(openapi_url=None)
    add_handlers(app)
    app.include_router(router)
    app.state.registered = Registered()
    app.add_middleware(_Bounded)
    return app


class BootstrapService:
    """The service at a listening socket, in the running event loop."""

    def __init__(self, sock: socket.socket) -> None:
        settings = uvicorn.Config(
            bootstrap_app(),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
        )
        self._socket, self._server = sock, Server(settings, STALL_S)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[sock]))

    async def stop(self) -> None:
        """Close the connections and the port."""
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait({self._task}, timeout=5.0)
        self._task.cancel()
        self._socket.close()

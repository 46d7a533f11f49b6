"""The bootstrap service as its clients see it: ranks of a prefill server register where they
listen, decode servers ask. The routes are SGLang's (``entrypoints/http/bootstrap.py``)."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from itertools import product
from typing import Any, Final
from urllib.parse import urlencode

from radixlm.base.errors import TransferError
from radixlm.base.record import Record
from radixlm.transfer.client import Address

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
LIMIT_S: Final = 10.0  # of an answer that comes byte by byte, and of asking for all ranks
REGISTER_PAUSE_S: Final = 0.5
MAX_ANSWER_BYTES: Final = 1 << 16
MAX_RANKS: Final = 4096
MAX_KNOWN: Final = 4096  # hosts and replicas: clients of a decode server name them
ALL: Final = {"engine_rank": -1, "target_dp_group": -1, "target_pp_rank": -1}


class Registration(Record):
    """A rank of a prefill server: where it listens, and its place."""

    address: Address
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    page_size: int = 1
    kv_cache_dtype: str = "auto"

    def body(self) -> dict[str, Any]:
        """Of PUT /route."""
        return {
            "role": "Prefill",
            "attn_tp_size": self.tp_size,
            "attn_tp_rank": self.tp_rank,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "pp_size": self.pp_size,
            "pp_rank": self.pp_rank,
            "system_dp_size": self.dp_size,
            "system_dp_rank": self.dp_rank,
            "rank_ip": self.address.host,
            "rank_port": self.address.port,
            "page_size": self.page_size,
            "kv_cache_dtype": self.kv_cache_dtype,
        }


def ask(host: str, port: int, method: str, path: str, body: Any = None) -> Any:
    """The JSON (or text) of an answer 200; TransferError for any other, and for none."""
    connection, timer = None, None
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=ANSWER_S)
        connection.connect()
        timer = threading.Timer(LIMIT_S, connection.sock.shutdown, (socket.SHUT_RDWR,))
        timer.daemon = True
        timer.start()
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER_BYTES).decode()
        if answer.status != 200:
            raise TransferError(f"{host}:{port}{path}: status {answer.status}: {text:.200}")
        return json.loads(text) if text[:1] in "{[" else text
    except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
        raise TransferError(f"{host}:{port}: {error or type(error).__name__}") from error
    finally:
        if timer is not None:
            timer.cancel()
        if connection is not None:
            connection.close()


def register_in_thread(host: str, port: int, registration: Registration) -> threading.Event:
    """Register until it succeeds; setting the event ends it."""
    is_over = threading.Event()

    def work() -> None:
        is_told = False
        while not is_over.is_set():
            try:
                ask(host, port, "PUT", "/route", registration.body())
                return
            except TransferError as error:
                if not is_told:
                    log.info("the bootstrap service does not answer yet: %s", error)
                is_told = True
                is_over.wait(REGISTER_PAUSE_S)

    threading.Thread(target=work, name="bootstrap", daemon=True).start()
    return is_over


class Directory:
    """Where the ranks of prefill servers listen, by their bootstrap services; thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], list[Address]] = {}
        self.seconds = 0.0
        self.num_asked = 0

    def ranks(self, host: str, port: int, room: int, dp_rank: int = -1) -> list[Address]:
        """The addresses of the replica that serves ``room``, by pipeline and tensor rank;
        TransferError if the service does not know."""
        sizes = self._sizes(host, port)
        tp, dp, pp = sizes
        group = dp_rank if 0 <= dp_rank < dp else room % dp
        known = self._known.get((host, port, group))
        if known is None:
            began_s = time.perf_counter()
            known = []
            for pp_rank, tp_rank in product(range(pp), range(tp)):
                if time.perf_counter() - began_s > LIMIT_S:
                    raise TransferError(f"{host}:{port}: {pp * tp} ranks are not told in time")
                known.append(self._rank(host, port, tp_rank, group, pp_rank))
            self._keep((host, port, group), known)
            self.seconds += time.perf_counter() - began_s
            self.num_asked += 1
        return known

    def _sizes(self, host: str, port: int) -> tuple[int, int, int]:
        found = self._known.get((host, port, -1))
        if found is not None:
            tp, dp, pp = (address.port for address in found)
            return tp, dp, pp
        answer = ask(host, port, "GET", f"/route?{urlencode(ALL)}")
        tp, dp, pp = (
            _number(answer, name, MAX_RANKS)
            for name in ("prefill_attn_tp_size", "prefill_dp_size", "prefill_pp_size")
        )
        self._keep((host, port, -1), [Address("", count) for count in (tp, dp, pp)])
        return tp, dp, pp

    def _keep(self, key: tuple[str, int, int], found: list[Address]) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = found

    def _rank(self, host: str, port: int, tp_rank: int, group: int, pp_rank: int) -> Address:
        query = {"engine_rank": tp_rank, "target_dp_group": group, "target_pp_rank": pp_rank}
        answer = ask(host, port, "GET", f"/route?{urlencode(query)}")
        rank_port = _number(answer, "rank_port", 65535)
        return Address(str(answer.get("rank_ip")), rank_port)

    def forget(self, host: str, port: int) -> None:
        """Ask again: a rank was not where it had been."""
        for key in [key for key in list(self._known) if key[:2] == (host, port)]:
            self._known.pop(key, None)


def _number(answer: Any, name: str, most: int) -> int:
    value = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(value, int) or not 1 <= value <= most:
        raise TransferError(f"the bootstrap service answers {name} {value!r}")
    return value

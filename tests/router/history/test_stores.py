"""Every store against a dict, and what only one of them does."""

import importlib.util
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from radixlm.base.errors import ConfigError, Overloaded
from radixlm.router.history.sql import Dialect, SqlStore, open_postgres
from radixlm.router.history.stores import (
    ENTRY_BYTES,
    MemoryStore,
    RedisStore,
    Store,
    open_store,
)
from radixlm.router.options import Options

KINDS = ("response", "conversation", "items:conv_a", "items:conv_b")


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A server of its own on a Unix socket."""
    real = shutil.which("postgres")
    if real is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL's programs and psycopg")
    programs = Path(real).resolve().parent
    folder = Path(tempfile.mkdtemp(prefix="radixlm-pg-"))  # pytest's own are closed to others
    as_user: list[str] = []
    if os.geteuid() == 0:  # which PostgreSQL refuses
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody")
    data = folder / "data"
    make = [*as_user, programs / "initdb", "-D", data, "-A", "trust", "-U", "radix", "-N"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    control = [*as_user, programs / "pg_ctl", "-D", data, "-t", "30"]
    options = f"-k {folder} -c listen_addresses="
    start = [*control, "-l", folder / "log", "-o", options, "-w", "start"]
    subprocess.run(start, check=True, capture_output=True, timeout=60)
    try:
        yield f"postgresql://radix@/postgres?host={folder}"
    finally:
        stop = [*control, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, capture_output=True, timeout=60)
        shutil.rmtree(folder)


@pytest.fixture(params=["memory", "redis", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore()
    elif request.param == "redis":
        made = RedisStore("", 4, 30, fakeredis.FakeRedis(server=fakeredis.FakeServer()))
    else:
        url = request.getfixturevalue("postgres_url")
        made = open_postgres(Options(history_backend="postgres", postgres_db_url=url))
        for kind in KINDS:
            made.drop(kind)
    yield made
    made.close()


def test_a_store_is_a_dict_in_order(store: Store) -> None:
    draw = random.Random(7)
    model: dict[str, dict[str, bytes]] = {kind: {} for kind in KINDS}
    for number in range(300):
        kind, key = draw.choice(KINDS), f"id_{draw.randrange(12)}"
        action = draw.choice(("put", "put", "put", "get", "delete", "items", "drop"))
        if action == "put":
            value = bytes([number % 256, 0, 255]) * draw.randrange(1, 5)
            store.put(kind, key, value)
            model[kind][key] = value
        elif action == "get":
            assert store.get(kind, key) == model[kind].get(key)
        elif action == "delete":
            assert store.delete(kind, key) == (model[kind].pop(key, None) is not None)
        elif ":" in kind and action == "items":
            assert store.items(kind) == list(model[kind].values())
        elif ":" in kind and draw.random() < 0.3:
            store.drop(kind)
            model[kind].clear()
    assert sum(map(len, model["items:conv_a"].values()))


def test_memory_is_bounded_and_a_conversation_goes_as_a_whole() -> None:
    limit = 10 * (100 + ENTRY_BYTES)
    store = MemoryStore(limit)
    store.put("conversation", "conv_a", b"x" * 100)
    for number in range(5):
        store.put("items:conv_a", f"item_{number}", b"y" * 100)
    for number in range(50):
        store.put("response", f"resp_{number}", b"z" * 100)
        assert store.num_bytes <= limit
    assert store.get("conversation", "conv_a") is None
    assert store.items("items:conv_a") == []
    assert store.get("response", "resp_49") is not None
    assert store.get("response", "resp_39") is None
    for number in range(50):
        store.delete("response", f"resp_{number}")
    assert store.num_bytes == 0


def test_entries_in_redis_expire() -> None:
    client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    store = RedisStore("", 4, 30, client)
    store.put("response", "resp_1", b"a")
    store.put("items:conv_a", "item_1", b"b")
    lives_s = [client.ttl(name) for name in client.keys("*") if not name.endswith(b"place")]
    assert len(lives_s) == 2 and all(29 * 86400 < life_s <= 30 * 86400 for life_s in lives_s)
    store.put("conversation", "conv_a", b"c")
    client.expire("radixlm:history:conversation:conv_a", 60)
    store.put("items:conv_a", "item_2", b"d")
    assert client.ttl("radixlm:history:conversation:conv_a") > 29 * 86400
    forever = RedisStore("", 4, -1, client)
    forever.put("response", "resp_2", b"a")
    assert client.ttl("radixlm:history:response:resp_2") == -1


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        open_store(Options(history_backend="redis", redis_url="redis://127.0.0.1:1"))
    assert open_store(Options(history_backend="none")) is None
    small = open_store(Options(history_memory_mb=1))
    assert small is not None
    small.put("response", "resp_1", bytes(2 << 20))
    assert small.get("response", "resp_1") is None
    if importlib.util.find_spec("psycopg"):
        url = "postgresql://radix@127.0.0.1:1/none"
        with pytest.raises(ConfigError, match="--postgres-db-url"):
            open_store(Options(history_backend="postgres", postgres_db_url=url))
    if not importlib.util.find_spec("oracledb"):
        with pytest.raises(ConfigError, match=r"pip install 'radixlm\[oracle\]'"):
            open_store(Options(history_backend="oracle", oracle_username="u"))


def test_a_connection_that_died_is_opened_again() -> None:
    class Failure(Exception):
        pass

    class Connection:
        def __init__(self, is_dead: bool) -> None:
            self.is_dead = is_dead
            self.rowcount = 1

        def cursor(self) -> Any:
            return self

        def execute(self, statement: str, values: Any) -> None:
            if self.is_dead:
                raise Failure("gone")

        def close(self) -> None:
            raise Failure("gone")

    made: list[Connection] = []

    def connect() -> Connection:
        made.append(Connection(is_dead=len(made) >= 3))
        return made[-1]

    store = SqlStore(Dialect(connect, Failure, *["SQL"] * 6), "--flag")
    made[0].is_dead = True
    assert store.delete("response", "resp_1")
    assert len(made) == 2
    made[1].is_dead = True
    assert store.delete("response", "resp_1")
    made[2].is_dead = True
    with pytest.raises(Overloaded, match="gone"):
        store.delete("response", "resp_1")

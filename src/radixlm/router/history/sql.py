"""The history in PostgreSQL or Oracle: one table, a connection for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from radixlm.base.errors import ConfigError, Overloaded
from radixlm.base.lazy import require
from radixlm.base.record import Record
from radixlm.router.flags import History as Options

TIMEOUT_S = 5
NUM_TRIES = 2  # a connection that was kept may be dead


class Dialect(Record):
    """What a database calls things. ``connect``: opens a connection in autocommit mode.
    ``failure``: base of the driver's errors."""

    connect: Callable[[], Any]
    failure: type[Exception]
    create: str
    put: str
    get: str
    items: str
    delete: str
    drop: str


class SqlStore:
    """Entries in the table radixlm_history."""

    is_local = False

    def __init__(self, dialect: Dialect, flag: str) -> None:
        """ConfigError, which names ``flag``: the database cannot be reached."""
        self._dialect = dialect
        self._mine = threading.local()
        self._all: list[Any] = []
        try:
            self._run(dialect.create, ())
        except Overloaded as error:
            raise ConfigError(f"{flag}: {error}") from error

    def _run(self, statement: str, values: Sequence[Any], read: bool = False) -> Any:
        """The rows, or how many rows changed."""
        for left in reversed(range(NUM_TRIES)):
            try:
                cursor = self._connection().cursor()
                cursor.execute(statement, values)
                return cursor.fetchall() if read else cursor.rowcount
            except self._dialect.failure as error:
                self._forget()
                if not left:
                    raise Overloaded(f"the history's database: {error}") from error
        return None

    def _connection(self) -> Any:
        if getattr(self._mine, "connection", None) is None:
            self._mine.connection = self._dialect.connect()
            self._all.append(self._mine.connection)
        return self._mine.connection

    def _forget(self) -> None:
        """Drop this thread's connection."""
        connection, self._mine.connection = getattr(self._mine, "connection", None), None
        if connection is not None:
            self._all.remove(connection)
            with suppress(self._dialect.failure):
                connection.close()

    def put(self, kind: str, key: str, value: bytes) -> None:
        self._run(self._dialect.put, (kind, key, value))

    def get(self, kind: str, key: str) -> bytes | None:
        rows = self._run(self._dialect.get, (kind, key), read=True)
        return _bytes(rows[0][0]) if rows else None

    def delete(self, kind: str, key: str) -> bool:
        return bool(self._run(self._dialect.delete, (kind, key)))

    def items(self, kind: str) -> list[bytes]:
        return [_bytes(row[0]) for row in self._run(self._dialect.items, (kind,), read=True)]

    def drop(self, kind: str) -> None:
        self._run(self._dialect.drop, (kind,))

    def close(self) -> None:
        for connection in self._all:
            with suppress(self._dialect.failure):
                connection.close()


def _bytes(value: Any) -> bytes:
    """Oracle's driver gives large values as objects to read from."""
    return bytes(value.read() if hasattr(value, "read") else value)


def open_postgres(options: Options) -> SqlStore:
    """--postgres-db-url, by psycopg."""
    psycopg: Any = require("psycopg", "postgres", "--history-backend postgres")

    def connect() -> Any:
        url = options.postgres_db_url or ""
        connection = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=TIMEOUT_S,
            tcp_user_timeout=TIMEOUT_S * 1000,
            keepalives_idle=TIMEOUT_S,
        )
        connection.execute(f"SET statement_timeout = '{TIMEOUT_S}s'")
        return connection

    where = "FROM radixlm_history WHERE kind = %s"
    dialect = Dialect(
        connect,
        psycopg.Error,
        create="CREATE TABLE IF NOT EXISTS radixlm_history (kind text, key text, "
        "place bigserial, made timestamptz DEFAULT now(), value bytea NOT NULL, "
        "PRIMARY KEY (kind, key))",
        put="INSERT INTO radixlm_history (kind, key, value) VALUES (%s, %s, %s) "
        "ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value, made = now()",
        get=f"SELECT value {where} AND key = %s",
        items=f"SELECT value {where} ORDER BY place",
        delete=f"DELETE {where} AND key = %s",
        drop=f"DELETE {where}",
    )
    return SqlStore(dialect, "--postgres-db-url")


def open_oracle(options: Options) -> SqlStore:
    """--oracle-connect-descriptor or --oracle-tns-alias, by oracledb in its thin mode."""
    oracledb: Any = require("oracledb", "oracle", "--history-backend oracle")
    wallet = options.oracle_wallet_path
    extra: dict[str, Any] = {}
    if wallet:
        extra = {"config_dir": wallet, "wallet_location": wallet}
        extra["wallet_password"] = options.oracle_password

    def connect() -> Any:
        connection = oracledb.connect(
            user=options.oracle_username,
            password=options.oracle_password,
            dsn=options.oracle_connect_descriptor or options.oracle_tns_alias,
            tcp_connect_timeout=options.oracle_pool_timeout_secs,
            **extra,
        )
        connection.autocommit = True
        connection.call_timeout = TIMEOUT_S * 1000
        return connection

    where = "FROM radixlm_history WHERE kind = :1"
    dialect = Dialect(
        connect,
        oracledb.Error,
        create="BEGIN EXECUTE IMMEDIATE 'CREATE TABLE radixlm_history (kind VARCHAR2(200), "
        '"KEY" VARCHAR2(200), place NUMBER GENERATED ALWAYS AS IDENTITY, made TIMESTAMP '
        'DEFAULT systimestamp, value BLOB, PRIMARY KEY (kind, "KEY"))\'; '
        "EXCEPTION WHEN OTHERS THEN IF SQLCODE != -955 THEN RAISE; END IF; END;",
        put='MERGE INTO radixlm_history old USING (SELECT :1 kind, :2 "KEY", :3 value FROM dual) '
        'new ON (old.kind = new.kind AND old."KEY" = new."KEY") WHEN MATCHED THEN UPDATE SET '
        "old.value = new.value, old.made = systimestamp WHEN NOT MATCHED THEN INSERT "
        '(kind, "KEY", value) VALUES (new.kind, new."KEY", new.value)',
        get=f'SELECT value {where} AND "KEY" = :2',
        items=f"SELECT value {where} ORDER BY place",
        delete=f'DELETE {where} AND "KEY" = :2',
        drop=f"DELETE {where}",
    )
    return SqlStore(dialect, "--oracle-connect-descriptor")

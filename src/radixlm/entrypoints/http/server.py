"""Run the HTTP server: start the engine first (it takes longest), then uvicorn, then wait.

SIGTERM, Ctrl-C and a terminal that is closed (SIGHUP) drain: readiness goes off, what runs may
finish within --drain-timeout, exit 0.
A second signal stops at once. An engine that cannot start ends the server with exit status 2.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from radixlm.base.addresses import unusable, url_host
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load
from radixlm.base.log import set_up_logging
from radixlm.base.stop_signals import stop_signals
from radixlm.base.units import format_seconds
from radixlm.config.server_config import ServerConfig
from radixlm.engine.downloaded import delete_checkpoint
from radixlm.engine.intake import ServerIntake
from radixlm.engine.launch import ProcessEngine, ThreadEngine, failure_error, intake_tokenizer
from radixlm.engine.model_info import ModelInfo, resolved
from radixlm.engine.packed_key import find_packed
from radixlm.engine.prefault import read_ahead
from radixlm.engine.run_folder import remove_stale
from radixlm.entrypoints.http.descriptors import BACKLOG, check_descriptors
from radixlm.entrypoints.http.root_path import prefix_of
from radixlm.observe.gcwatch import GcWatch
from radixlm.observe.ring import StepRing

if TYPE_CHECKING:
    import uvicorn

    from radixlm.entrypoints.http.state import ServerState

log = logging.getLogger(__name__)

WARM_UP_S = 60.0
MAX_PATH_BYTES = 107  # of a Unix socket (unix(7))


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket; ConfigError if the address, or descriptors, cannot be had."""
    check_descriptors()
    if config.serve.uds is not None:
        return _listen_unix(Path(config.serve.uds))
    return _listen_at(config.serve.host, config.serve.port, "--port", "--port 0 takes a free one")


def _listen_at(host: str, port: int, flag: str, works: str) -> socket.socket:
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        raise unusable(error, host, flag, port, works) from error
    sock.setblocking(False)
    return sock


def _listen_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not path.is_socket():
            raise ConfigError(f"--uds {path}: it is there and no socket; name a new file")
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise ConfigError(f"--uds {path}: a server listens there; name another path")
            path.unlink()  # of a server that was killed
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except (OSError, ConfigError) as error:
        sock.close()
        if isinstance(error, ConfigError):
            raise
        works = f"/tmp/radixlm.sock works, and any path of at most {MAX_PATH_BYTES} bytes"
        raise ConfigError(f"--uds {path}: {error.strerror or error}; {works}") from error
    sock.setblocking(False)
    return sock


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Where clients of this machine reach the server."""
    serve = config.serve
    if serve.uds is not None:
        return f"unix:{serve.uds}"
    host = "127.0.0.1" if serve.host in ("0.0.0.0", "::") else serve.host
    scheme = "http" if serve.ssl_certfile is None else "https"
    return (
        f"{scheme}://{url_host(host)}:{sock.getsockname()[1]}{prefix_of(serve.fastapi_root_path)}"
    )


def start_bootstrap(config: ServerConfig) -> Any:
    """The bootstrap service of a prefill server, in the running event loop; None of others."""
    disagg = config.disagg
    if disagg.disaggregation_mode != "prefill":
        return None
    flag, works = "--disaggregation-bootstrap-port", "another port works"
    sock = _listen_at(config.serve.host, disagg.disaggregation_bootstrap_port, flag, works)
    return load("radixlm.entrypoints.http.bootstrap:BootstrapService")(sock)


def run(config: ServerConfig, given: frozenset[str]) -> int:
    """Serve until a signal; the exit status."""
    began_s = time.monotonic()
    set_up_logging(
        "server",
        config.observe.log_level,
        config.observe.log_level_http,
        log_format=config.observe.log_format,
    )
    load("radixlm.entrypoints.http.tls:make_context")(config.serve)  # refuse early
    config, info = resolved(config, given)
    for folder in remove_stale():
        log.info("removed %s, which a server that was killed has left", folder)
    if config.model.load_format != "dummy":
        read_ahead(info.folder, find_packed(config, info.folder))
    sock = listen(config)
    try:
        if config.parallel.use_ray and config.parallel.nnodes > 1:
            with load("radixlm.engine.ray_nodes:placed_nodes")(config, given) as config:
                return _serve(config, given, info, sock, began_s)
        return _serve(config, given, info, sock, began_s)
    finally:
        if config.serve.uds is not None:
            Path(config.serve.uds).unlink(missing_ok=True)


def _serve(
    config: ServerConfig,
    given: frozenset[str],
    info: ModelInfo,
    sock: socket.socket,
    began_s: float,
) -> int:
    if config.serve.tokenizer_worker_num > 1:
        gc.enable()
        serve_many = load("radixlm.entrypoints.http.workers:serve_many")
        return int(serve_many(config, given, sock))
    return int(uvloop.run(Server(config, given, info, sock, began_s).serve()))


class Engine(Protocol):
    """What an HTTP process needs of its engine. ``start`` returns before the engine is ready."""

    intake: ServerIntake

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def _engine(config: ServerConfig, given: frozenset[str], info: ModelInfo) -> Engine:
    if config.serve.engine_in_process:
        ring = None if config.serve.disable_ui else StepRing()
        return ThreadEngine(config, info, None, ring=ring)
    return ProcessEngine(config, given, info, None)


class Server:
    """One HTTP process with an engine behind it."""

    def __init__(
        self,
        config: ServerConfig,
        given: frozenset[str],
        info: ModelInfo,
        sock: socket.socket,
        began_s: float,
        engine: Engine | None = None,
    ) -> None:
        """``engine``: one that other processes share; by default this process starts its own."""
        self.config, self.given, self.info = config, given, info
        self.sock, self.began_s = sock, began_s
        self.is_shared = engine is not None
        self.engine: Engine  # of ``serve`` where it is not shared
        if engine is not None:
            self.engine = engine
        self.is_first = True  # of the processes that share an engine
        self.uvicorn: uvicorn.Server | None = None
        self.state: ServerState  # once the application is made
        self.num_signals = 0
        names = config.serve.warmups
        self.warm_ups = load("radixlm.entrypoints.http.warmups:warm_ups")(names) if names else []
        self._dumped = config.execute.debug_tensor_dump_input_file
        if self._dumped is not None:
            self.warm_ups.append(load("radixlm.entrypoints.http.warmups:of_file")(self._dumped))
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> int:
        """Start the engine and the HTTP server, and run until both end; the exit status."""
        if not self.is_shared:
            self.engine = _engine(self.config, self.given, self.info)
        bootstrap = None if self.is_shared else start_bootstrap(self.config)
        await self.engine.start()
        try:
            # while the engine loads its model
            tokenizer = intake_tokenizer(self.config, self.info)
            self.engine.intake.tokenizer = tokenizer
            return await self._serve_http(tokenizer)
        finally:
            await self.engine.stop()
            if bootstrap is not None:
                await bootstrap.stop()

    async def _serve_http(self, tokenizer: Any) -> int:
        create_app = load("radixlm.entrypoints.http.app:create_app")
        make_uvicorn = load("radixlm.entrypoints.http.app:make_uvicorn")
        intake = self.engine.intake
        app = create_app(self.config, self.info, tokenizer, intake, self.is_first)
        self.state = app.state.server
        self.state.is_warm = self.config.serve.skip_server_warmup and not self.warm_ups
        self.uvicorn = make_uvicorn(app, self.config)
        intake.on_failed = lambda failure: self._stop_now()
        loop = asyncio.get_running_loop()
        for signum in () if self.is_shared else stop_signals():
            loop.add_signal_handler(signum, self.on_signal, signum)
        self._spawn(self._announce())
        if self.config.serve.enable_ssl_refresh and self.uvicorn.config.ssl is not None:
            refresher = load("radixlm.entrypoints.http.tls:Refresher")
            self._spawn(refresher(self.uvicorn.config.ssl, self.config.serve).run())
        GcWatch(self.config.observe.gc_warning_threshold_secs).install()
        gc.collect()
        gc.freeze()  # these objects stay: the collector need not visit them again
        gc.enable()
        await self.uvicorn.serve(sockets=[self.sock])
        for task in self._tasks:
            task.cancel()  # who stops before it is ready announces nothing
        if intake.failure is not None:
            if self.is_first:
                print(f"radixlm: {failure_error(intake.failure)}", file=sys.stderr)
            return 2
        log.info("stopped")
        return 0

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self) -> None:
        intake = self.engine.intake
        url = url_of(self.config, self.sock)  # uvicorn closes the socket where it stops early
        await intake.ready.wait()
        if self.is_first and self.config.model.delete_ckpt_after_loading:
            # while the files are there
            await load("radixlm.entrypoints.http.resume:resume_digest")(self.state)
            await asyncio.to_thread(delete_checkpoint, self.config)
        if not self.config.serve.skip_server_warmup:
            await load("radixlm.entrypoints.http.admin.health:probe")(intake, WARM_UP_S)
        if self.is_first:
            if self.warm_ups:
                await load("radixlm.entrypoints.http.warmups:run_warm_ups")(self.warm_ups, intake)
            if self._dumped is not None:
                log.info("--debug-tensor-dump-input-file has run: the server ends")
                self._stop_now()
                return
        load("radixlm.entrypoints.http.app:resume")(self.state)
        self.state.is_warm = True
        self.state.ready_after_s = time.monotonic() - self.began_s
        took = format_seconds(self.state.ready_after_s)
        log.info("ready in %s: %s serves %s", took, url, self.config.serve.served_model_name)
        is_told = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
        if is_told and self.is_first and url.startswith("http:"):
            page = "" if self.config.serve.disable_ui else f"open {url}/ui in a browser, or\n  "
            print(
                f"\nTry it:\n  {page}curl {url}/v1/chat/completions "
                "-H 'Content-Type: application/json' "
                """-d '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'\n""",
                file=sys.stderr,
            )

    def on_signal(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if name == "SIGHUP" and self.num_signals:
            return  # shell and kernel both tell of a closed terminal
        self.num_signals += 1
        if self.num_signals > 1:
            log.warning("second signal: stopping at once")
            self._spawn(self._drain_within(0.0))
            return
        running = len(self.engine.intake.requests)
        log.info("%s: draining, %d requests run", name, running)
        self._spawn(self._drain())

    async def _drain(self) -> None:
        self.engine.intake.leaving.set()
        await load("radixlm.entrypoints.http.app:stop_background")(self.state)
        await self._drain_within(self.config.serve.drain_timeout)

    async def _drain_within(self, limit_s: float) -> None:
        """Stop after so long at most; what still runs then is told so, with a 503."""
        await self.engine.intake.drain(limit_s)
        self._stop_now()

    def _stop_now(self) -> None:
        if self.uvicorn is not None:
            load("radixlm.entrypoints.http.live:close")(self.state)  # viewers never end
            self.uvicorn.should_exit = True
            self.uvicorn.force_exit = self.num_signals > 1

"""The FastAPI application: its routes, error handlers, middleware and uvicorn server."""

import importlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from radixlm import __version__
from radixlm.base.env import DISABLE_OPENAPI_DOC, KEEP_ALIVE_S
from radixlm.base.errors import ConfigError
from radixlm.base.lazy import load, require
from radixlm.base.log import level_number
from radixlm.base.private_files import close_to_others
from radixlm.config.serve import ServeConfig
from radixlm.config.server_config import ServerConfig
from radixlm.continuation.sessions import Sessions
from radixlm.engine.intake import ServerIntake
from radixlm.engine.model_info import ModelInfo
from radixlm.engine.tensor_updates import TensorUpdates
from radixlm.entrypoints.http import (
    anthropic,
    invocations,
    live,
    llama_cpp,
    not_implemented,
    ollama,
    tgi,
    token_requests,
    tokenization,
    ui,
    vllm,
)
from radixlm.entrypoints.http.access import AccessObserver
from radixlm.entrypoints.http.admin import (
    adapters,
    control,
    corpora,
    details,
    experts,
    health,
    hicache,
    info,
    metrics,
    occupation,
    profiles,
    request_log,
    stacks,
    weight_files,
    weight_tensors,
    weights,
)
from radixlm.entrypoints.http.batches import files, messages
from radixlm.entrypoints.http.batches import routes as batches
from radixlm.entrypoints.http.batches.runner import Batches
from radixlm.entrypoints.http.browser_guard import with_cors
from radixlm.entrypoints.http.descriptors import BACKLOG
from radixlm.entrypoints.http.errors import add_handlers
from radixlm.entrypoints.http.formats import set_formats
from radixlm.entrypoints.http.middleware import RequestMiddleware
from radixlm.entrypoints.http.native import generate, grammar, parse
from radixlm.entrypoints.http.native.vertex import vertex_router
from radixlm.entrypoints.http.openai import chat, completions, fim
from radixlm.entrypoints.http.openapi.document import openapi_of
from radixlm.entrypoints.http.pooling import cohere, embeddings, rerank, score, tei
from radixlm.entrypoints.http.responses import compact, conversations
from radixlm.entrypoints.http.responses import routes as responses
from radixlm.entrypoints.http.responses.background import Responses
from radixlm.entrypoints.http.responses.store import ResponseStore, store_of
from radixlm.entrypoints.http.responses.toolbox import servers_of
from radixlm.entrypoints.http.root_path import WithoutPrefix, WithVersion, prefix_of
from radixlm.entrypoints.http.speech import routes as speech
from radixlm.entrypoints.http.state import ServerState
from radixlm.entrypoints.http.tls import make_context
from radixlm.entrypoints.http.uvicorn_protocol import Http, is_news
from radixlm.entrypoints.http.uvicorn_protocol import Server as HttpServer
from radixlm.entrypoints.native.request import default_sampling
from radixlm.text.fim import detect_fim, load_fim_template
from radixlm.text.tokenizer import Tokenizer

_ROUTERS = (
    health.router,
    info.router,
    details.router,
    generate.router,
    control.router,
    occupation.router,
    adapters.router,
    weight_files.router,
    weights.router,
    weight_tensors.router,
    corpora.router,
    experts.router,
    hicache.router,
    profiles.router,
    request_log.router,
    stacks.router,
    live.router,
    tokenization.router,
    completions.router,
    fim.router,
    chat.router,
    speech.router,
    embeddings.router,
    rerank.router,
    score.router,
    invocations.router,
    token_requests.router,
    cohere.router,
    parse.router,
    grammar.router,
    anthropic.router,
    messages.router,
    ollama.router,
    llama_cpp.router,
    tgi.router,
    tei.router,
    vllm.router,
    compact.router,
    conversations.router,
    responses.router,
    files.router,
    batches.router,
    ui.router,
    not_implemented.router,
)


def create_app(
    config: ServerConfig,
    info_: ModelInfo,
    tokenizer: Tokenizer | None,
    intake: ServerIntake,
    is_first: bool = True,
) -> FastAPI:
    """The application. ``intake``: of an engine that runs or is starting; ``is_first``: of the
    processes that share it. ConfigError for a bad template or parser."""
    app = bare_app()
    state = make_state(config, info_, tokenizer, intake)
    app.state.server = state
    made = metrics.install(app, state, is_first) if config.observe.enable_metrics else None
    request_log.install_request_log(state)
    request_log.install_crash_dump(state)
    live.install(state)
    if config.observe.enable_trace:
        load("radixlm.entrypoints.http.tracing:install")(app, state)
    app.add_middleware(
        RequestMiddleware, serve=config.serve, fair_header=config.schedule.fair_share
    )
    if made is not None:
        routes = [*app.routes, *(one for router in _ROUTERS for one in router.routes)]
        app.add_middleware(metrics.HttpCounter, counts=made.http, routes=routes)
    # outside of the other middleware, so that browsers may read its errors too
    app.add_middleware(with_cors, option=config.serve.cors_allowed_origins)
    app.add_middleware(WithVersion)
    if prefix := prefix_of(config.serve.fastapi_root_path):
        app.servers = [{"url": prefix}]  # in the OpenAPI document
        app.add_middleware(WithoutPrefix, prefix=prefix)  # before all that looks at paths
    return app


def bare_app() -> FastAPI:
    """All routes and the OpenAPI document, without an engine."""
    has_doc = not DISABLE_OPENAPI_DOC.get()
    app = FastAPI(
        title="RadixLM",
        version=__version__,
        description="Serves a language model: native, OpenAI, Anthropic and Ollama routes.",
        openapi_url="/openapi.json" if has_doc else None,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; ui.py has /docs
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    add_handlers(app)
    for router in (*_ROUTERS, vertex_router()):
        app.include_router(router)
    app.openapi = lambda: openapi_of(app)  # type: ignore[method-assign]
    return app


def make_state(
    config: ServerConfig, info_: ModelInfo, tokenizer: Tokenizer | None, intake: ServerIntake
) -> ServerState:
    """The state that the routes share; its observers are added to ``intake``."""
    sessions = Sessions(tokenizer)
    intake.observers = (*intake.observers, sessions, AccessObserver())
    intake.weights.version = config.model.weight_version
    state = ServerState(
        config=config,
        info=info_,
        tokenizer=tokenizer,
        intake=intake,
        model_name=config.serve.served_model_name or info_.folder.name,
        defaults=default_sampling(info_.generation, config.serve),
        sessions=sessions,
    )
    servers = servers_of(config.serve.tool_server)
    state.extras[TensorUpdates] = TensorUpdates(config, intake)
    state.extras[Responses] = Responses(_response_store(config), servers)
    folder = Path(config.serve.file_storage_path)
    for kind in ("files", "batches"):
        close_to_others(folder / kind)
    stored = state.extras[files.Files] = files.Files(folder / "files")
    state.extras[Batches] = Batches(folder / "batches", stored)
    if config.serve.completion_template:
        state.fim = load_fim_template(config.serve.completion_template)
    elif tokenizer is not None:
        state.fim = detect_fim(tokenizer)
    if tokenizer is not None:
        set_formats(state, tokenizer)
    return state


def resume(state: ServerState) -> int:
    """Continue the batches of processes that have ended; how many may be. Call when the engine is
    ready."""
    state.extra(Responses).fail_unfinished()
    return state.extra(Batches).resume(state)


async def stop_background(state: ServerState) -> None:
    """Stop batches, which the next process continues. Call when the server drains."""
    await state.extra(Batches).stop()
    grammar.close_grammars(state)
    state.extra(request_log.RequestLog).lines.close()
    await state.extra(TensorUpdates).groups.close()


def _response_store(config: ServerConfig) -> ResponseStore:
    """The store of --response-store; ConfigError for one that cannot be used."""
    serve = config.serve
    has_many = serve.tokenizer_worker_num > 1
    if has_many and serve.response_store == "memory":
        raise ConfigError("--response-store memory: leave --tokenizer-worker-num at 1")
    is_persistent = has_many or serve.file_storage_path != ServeConfig().file_storage_path
    folder = Path(serve.file_storage_path)
    return store_of(serve.response_store, folder, is_persistent, serve.response_store_bytes)


def _protocol(serve: ServeConfig) -> Any:
    """uvicorn's class, or what makes one. ConfigError without the extra of --enable-http2."""
    if not serve.enable_http2:
        return Http
    require("h2", "http2", "--enable-http2")
    http2 = importlib.import_module("radixlm.entrypoints.http.http2")
    return partial(http2.EitherHttp, http2.http2_limits(serve))


def make_uvicorn(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    """The HTTP server; ``serve(sockets=[...])`` runs it in the current event loop."""
    is_debug = level_number(config.observe.log_level_http) <= logging.DEBUG
    if not is_debug:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)
    settings = uvicorn.Config(
        app,
        loop="none",
        http=_protocol(config.serve),
        backlog=BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # access.py writes lines that know the tokens
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S.get(),
        timeout_graceful_shutdown=max(1, round(config.serve.drain_timeout)),
    )
    context = make_context(config.serve)
    server = HttpServer(settings, config.serve.stall_timeout_s)
    settings.load()
    settings.ssl = context
    return server

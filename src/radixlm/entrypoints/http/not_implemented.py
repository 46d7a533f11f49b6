"""Routes of the reference whose feature is not implemented: 501 with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixlm.base.errors import NotSupported

router = APIRouter(tags=["not implemented"])

_SEED = (
    "weights are not sent through process groups; start the new server with --load-format "
    "remote_instance, or --model-path instance://host:port, which reads them from this port"
)
_IPC = (
    "its sockets carry pickled CUDA handles, which are not read; what works: "
    "/update_weights_from_tensor with tensor_handles, or /update_weights_from_distributed"
)
_PD = "roles are what a router sends: a server of either mode serves requests without a room whole"
_GEMINI = "Gemini's API is not spoken: POST /v1/chat/completions, /v1/responses or /v1/messages"
_POST = ("POST",)

NOT_IMPLEMENTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("/update_weights_from_ipc", _POST, _IPC),
    ("/init_weights_send_group_for_remote_instance", _POST, _SEED),
    ("/send_weights_to_remote_instance", _POST, _SEED),
    ("/pd_role_switch", _POST, _PD),
    ("/v1/audio/speech", _POST, "text-to-speech models are not supported"),
    ("/v1/realtime", ("GET",), "live audio is not supported: POST /v1/audio/transcriptions"),
    ("/v1/interactions", _POST, _GEMINI),
    ("/v1beta/models/{call}", _POST, _GEMINI),
    ("/v1/moderations", _POST, "this server does not moderate"),
    ("/dumper/{method}", _POST, "dumping tensors is not implemented"),
    ("/v1/images/generations", _POST, "image generation is not supported"),
    ("/v1/decisions", _POST, "decision models are not implemented"),
    ("/v1/systemone", _POST, "decision models are not implemented"),
)


def _route(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        raise NotSupported(f"{path}: {why}")

    respond.__doc__ = f"501: {why}."
    return respond


for _path, _methods, _why in NOT_IMPLEMENTED:
    for _method in _methods:
        router.add_api_route(
            _path,
            _route(_path, _why),
            methods=[_method],
            name=f"{_method} {_path}",
            status_code=501,
            include_in_schema=False,  # the document lists only what works
            response_class=Response,
        )

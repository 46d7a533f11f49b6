"""Send weights to a server from a program that trains them. Needs neither torch nor an HTTP library
of its own: a torch tensor brings torch with it.

    from radixlm.weights_client import update_weights_from_tensor

    update_weights_from_tensor("http://127.0.0.1:30000", model.named_parameters())
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode, urlsplit

from radixlm.base.errors import EngineError, InvalidRequest
from radixlm.wire.tensors import FLAT_TENSOR, TensorInfo, make_header, tensor_info

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
TIMEOUT_S = 600.0


def update_weights_from_tensor(
    url: str,
    named_tensors: NamedTensors,
    *,
    shared_memory: bool = False,
    load_format: str | None = None,
    flush_cache: bool = True,
    abort_all_requests: bool = False,
    mode: str | None = None,
    weight_version: str | None = None,
    api_key: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Replace these tensors of the model that the server at ``url`` has; its answer. torch tensors
    (on a GPU they are copied), DTensors (made whole) or numpy arrays by their names in the
    checkpoint. ``shared_memory``: over /dev/shm, to a server of the same user on this host.
    ``mode``: what happens to running requests (wait, abort, retract, in_place).
    InvalidRequest if the server refuses them, EngineError if it fails, OSError if it cannot be
    reached."""
    options = {
        "load_format": load_format,
        "flush_cache": flush_cache,
        "abort_all_requests": abort_all_requests,
        "mode": mode,
        "weight_version": weight_version,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if shared_memory:
        return _send_shared(url, _by_name(named_tensors), options, api_key, timeout_s)
    total, pieces = encode(named_tensors)
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in options.items()}
    query = urlencode(texts)
    kind = {"Content-Type": "application/octet-stream", "Content-Length": str(total)}
    return _post(f"{url}?{query}", pieces, kind, api_key, timeout_s)


def encode(named_tensors: NamedTensors) -> tuple[int, Iterator[Any]]:
    """A safetensors file of these tensors: its size in bytes, and its pieces. InvalidRequest for
    what is no tensor."""
    tensors = _by_name(named_tensors)
    infos = [_info(name, tensor) for name, tensor in tensors.items()]
    head = make_header(infos)

    def pieces() -> Iterator[Any]:
        yield head
        for tensor in tensors.values():
            yield _bytes(tensor)

    return len(head) + sum(info.num_bytes for info in infos), pieces()


def unflatten(bucket: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of SGLang's flattened bucket: {"flattened_tensor": a torch tensor, "metadata": a
    list of entries with name, shape, dtype, start_idx, end_idx}. InvalidRequest for another."""
    try:
        flat, entries = bucket[FLAT_TENSOR], bucket["metadata"]
        torch = sys.modules["torch"]
        for entry in entries:
            facts = entry if isinstance(entry, Mapping) else vars(entry)
            dtype = getattr(torch, str(facts["dtype"]).removeprefix("torch."))
            part = flat[facts["start_idx"] : facts["end_idx"]]
            if flat.dtype == torch.uint8:  # of the tensors' bytes
                part = part.clone().view(dtype)
            yield facts["name"], part.reshape(tuple(facts["shape"])).to(dtype)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidRequest(f"flattened_bucket: {error!r:.200}") from error


def checksums(named_tensors: NamedTensors) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, as ``/weights_checker`` answers them."""
    tensors = _by_name(named_tensors)
    return {name: hashlib.sha256(_bytes(one)).hexdigest() for name, one in tensors.items()}


def _by_name(named_tensors: NamedTensors) -> dict[str, Any]:
    return dict(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)


def _send_shared(
    url: str,
    tensors: dict[str, Any],
    options: dict[str, Any],
    api_key: str | None,
    timeout_s: float,
) -> dict[str, Any]:
    name = f"radixlm-weights-{os.getpid()}-{secrets.token_hex(6)}"
    path, handles, at = f"/dev/shm/{name}", [], 0
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for info in [_info(name, tensor) for name, tensor in tensors.items()]:
                data = _bytes(tensors[info.name])
                file.write(data)
                handle = {"name": info.name, "dtype": info.dtype, "shape": info.shape, "shm": name}
                digest = hashlib.sha256(data).hexdigest()
                handles.append({**handle, "offset": at, "digest": digest})
                at += info.num_bytes
        sent = json.dumps({**options, "tensor_handles": handles}).encode()
        return _post(url, sent, {"Content-Type": "application/json"}, api_key, timeout_s)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _post(
    url: str, body: Any, headers: dict[str, str], api_key: str | None, timeout_s: float
) -> dict[str, Any]:
    """POST to /update_weights_from_tensor of ``url``, whose query is kept."""
    place = urlsplit(url)
    is_tls, host = place.scheme == "https", place.hostname or "127.0.0.1"
    link: http.client.HTTPConnection
    if is_tls:
        context = ssl.create_default_context()
        link = http.client.HTTPSConnection(host, place.port, timeout=timeout_s, context=context)
    else:
        link = http.client.HTTPConnection(host, place.port, timeout=timeout_s)
    if api_key:
        headers = {**headers, "Authorization": f"Bearer {api_key}"}
    path = f"{place.path.rstrip('/')}/update_weights_from_tensor"
    try:
        try:
            link.request("POST", f"{path}?{place.query}" if place.query else path, body, headers)
        except (BrokenPipeError, ConnectionResetError):  # it has refused before the end: read why
            pass
        answer = link.getresponse()
        text = answer.read()
    finally:
        link.close()
    return _checked(answer.status, text)


def _checked(status: int, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    values: dict[str, Any] = found if isinstance(found, dict) else {}
    if status == 200 and values.get("success"):
        return values
    message = values.get("message") or f"HTTP {status}: {text[:200]!r}"
    if 400 <= status < 500:
        raise InvalidRequest(f"update_weights_from_tensor: {message}")
    raise EngineError(f"update_weights_from_tensor: {message}")


def _info(name: str, tensor: Any) -> TensorInfo:
    try:
        return tensor_info(name, tensor.dtype, [int(size) for size in tensor.shape])
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"named_tensors: {error}") from None


def _bytes(tensor: Any) -> memoryview:
    """The bytes of a tensor in row-major order."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if hasattr(tensor, "full_tensor"):  # a DTensor: only its part is here
            tensor = tensor.full_tensor()
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(tensor.reshape(-1).view("uint8"))

"""OTLP collectors on loopback, of the official protocol: by gRPC and by HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any

import pytest

WAIT_S = 20.0


class Collector:
    """Keeps the spans that arrive; it listens at ``endpoint`` inside ``with``."""

    endpoint: str

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self._news = threading.Condition()

    def take(self, request: Any) -> None:
        with self._news:
            for group in request.resource_spans:
                self.resources.append(values(group.resource.attributes))
                for scope in group.scope_spans:
                    self.spans.extend(scope.spans)
            self._news.notify_all()

    def wait_for(self, name: str, count: int = 1) -> list[Any]:
        """The spans of a name, once there are ``count``."""
        with self._news:
            done = self._news.wait_for(lambda: len(self.named(name)) >= count, WAIT_S)
        assert done, (name, [span.name for span in self.spans])
        return self.named(name)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def below(self, span: Any) -> list[Any]:
        """The children of a span, in the order of their starts."""
        found = [other for other in self.spans if other.parent_span_id == span.span_id]
        return sorted(found, key=lambda other: (other.start_time_unix_nano, other.name))

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        grpc = pytest.importorskip("grpc")
        proto = "opentelemetry.proto.collector.trace.v1."
        messages = pytest.importorskip(f"{proto}trace_service_pb2")
        services = pytest.importorskip(f"{proto}trace_service_pb2_grpc")
        collector = self

        class Service(services.TraceServiceServicer):  # type: ignore[misc, name-defined]
            def Export(self, request: Any, context: Any) -> Any:
                collector.take(request)
                return messages.ExportTraceServiceResponse()

        self._server: Any = grpc.server(ThreadPoolExecutor(2))
        services.add_TraceServiceServicer_to_server(Service(), self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(WAIT_S)


class HttpCollector(Collector):
    """The same by HTTP with protobuf bodies."""

    def start(self) -> None:
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.take(messages.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as a dict."""
    return {pair.key: _plain(pair.value) for pair in attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_plain(one) for one in found.values] if kind == "array_value" else found

"""Sends one request to a server and times the answer."""

import time

from radixlm.base.errors import TransferError
from radixlm.bench.backends import Backend, Outcome, RequestOptions, error_text
from radixlm.bench.client import HttpClient, Response
from radixlm.bench.datasets import Row


class Requester:
    """Sends rows of a dataset to a server. A failed request gives an Outcome, not an exception."""

    def __init__(self, client: HttpClient, backend: Backend, options: RequestOptions) -> None:
        self._client, self._backend, self._options = client, backend, options

    async def ask(self, row: Row) -> Outcome:
        """Send one row and wait for its answer."""
        body = self._backend.body(row, self._options)
        meter = self._backend.meter(time.perf_counter())
        out = meter.out
        on_event = meter.event if self._options.is_stream else None
        try:
            response = await self._client.ask("POST", self._backend.path, body, on_event)
        except TransferError as error:
            out.error = str(error)
            return out
        out.status = response.status
        out.retry_after = response.headers.get("retry-after")
        if response.status != 200:
            out.error = f"status {response.status}: {_message(response)}"
            return out
        if self._options.is_stream:
            meter.finish()
        else:
            meter.whole(response.json() or {})
            out.latency_s = out.ttft_s = time.perf_counter() - out.start_s
        if not out.error and out.latency_s == 0.0:
            # no visible token came, so only the end of the answer can be timed
            out.latency_s = out.ttft_s = time.perf_counter() - out.start_s
        out.is_ok = not out.error
        return out


def _message(response: Response) -> str:
    parsed = response.json()
    text = error_text(parsed) if parsed is not None else response.body.decode("utf-8", "replace")
    return text[:300]

"""Journal: what another worker needs to go on with a stream.

A RadixLM worker that is asked to (``HEADER``) puts comment lines ": j RECORD ..." before the
blocks of its stream (``continuation/stream_journal.py``). The gateway keeps the records unread, and
gives them to the next worker with the same body: that worker makes the same blocks of them, leaves
out those that were sent, and computes the rest.
"""

from __future__ import annotations

import re
from typing import Any

from radixlm.router.call import Call
from radixlm.router.foreign import ForeignText
from radixlm.router.worker import Worker

HEADER = (b"x-radixlm-journal", b"1")
MAX_KILLS = 2  # workers that may die of a request
_LINE = b": j "
_LINES = re.compile(rb"^: j ([^\n]*)\n", re.MULTILINE)
_BYTES_A_STREAM = 512  # of the objects of one journal
MAX_BLOCK_BYTES = 8 << 20  # a longer one goes on in pieces


class JournalMemory:
    """The bytes of all journals together. ``limit`` of 0: no stream is journaled."""

    __slots__ = ("limit", "num_dropped", "used")

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit, self.used, self.num_dropped = limit, 0, 0

    def take(self, count: int) -> bool:
        """Reserve ``count`` bytes, if there are so many."""
        if self.used + count > self.limit:
            return False
        self.used += count
        return True


def client_resume(call: Call, worker: Worker) -> dict[str, Any] | None:
    """The client's field ``resume`` without ``kills``, if it must go without: they put a request
    before others, and a worker believes them of whoever sends its key, as the gateway does."""
    if worker.api_key is None or call.is_admin:
        return None
    if b"kills" not in call.body and b"\\u" not in call.body:
        return None
    resume = call.fields.get("resume")
    if not isinstance(resume, dict) or "kills" not in resume:
        return None
    return {name: value for name, value in resume.items() if name != "kills"}


class Journal:
    """Of one stream, from its first worker to its end. ``close`` it in any case.

    ``num_blocks``: whole blocks that ``feed`` has returned, of all workers together. ``kills``:
    workers in a row that died before they gave a block. ``text``: of a stream that goes on without
    records.
    """

    __slots__ = (
        "_asked",
        "_digest",
        "_keeps_lines",
        "_memory",
        "_records",
        "_rest",
        "_seen",
        "_separator",
        "_taken",
        "is_dropped",
        "kills",
        "num_blocks",
        "text",
    )

    def __init__(self, call: Call, worker: Worker, memory: JournalMemory | None = None) -> None:
        """``worker``: the one that answers first."""
        self._memory = memory or JournalMemory()
        self._digest: str | None = worker.facts.get("resume_digest")
        self._separator = b"\n" if call.path.startswith("/api/") else b"\n\n"  # Ollama's lines
        # the client is a gateway with a journal of its own
        self._keeps_lines = call.header(HEADER[0]) is not None
        self._records, self._rest = bytearray(), b""
        self._asked: dict[str, Any] = {}  # what the client's own field has besides
        self.num_blocks = self._seen = self.kills = self._taken = 0
        self.is_dropped = not self._take(_BYTES_A_STREAM)
        self.text: ForeignText | None = None
        if b'"resume"' in call.body:
            self._begin(client_resume(call, worker) or call.fields.get("resume"))

    def _begin(self, resume: Any) -> None:
        """Go on with what the client, a gateway, has sent."""
        self._asked = resume if isinstance(resume, dict) else {}
        if not isinstance(self._asked.get("journal"), list):
            return
        self._keep(" ".join(map(str, self._asked["journal"])).encode())
        if isinstance(self._asked.get("num_events"), int):
            self.num_blocks = self._seen = self._asked["num_events"]

    def _take(self, count: int) -> bool:
        if not self._memory.take(count):
            return False
        self._taken += count
        return True

    def _keep(self, records: bytes) -> None:
        if self.is_dropped:
            return
        if self._take(len(records) + 1):
            self._records += records + b" "
        else:
            self._drop()

    def _drop(self) -> None:
        """This stream cannot be moved any more."""
        self.is_dropped = True
        self._memory.num_dropped += 1
        self.close()

    def feed(self, chunk: bytes) -> bytes:
        """The blocks that ``chunk`` completes, without the records; empty if it completes none."""
        data = self._rest + chunk if self._rest else chunk
        separator = self._separator
        end = data.rfind(separator) + len(separator)
        if end < len(separator) and b"\r\n\r\n" in data and self.num_blocks == self._seen:
            self._separator = separator = b"\r\n\r\n"  # a worker with lines of another form
            end = data.rfind(separator) + len(separator)
        if end < len(separator):  # not found
            if len(data) <= MAX_BLOCK_BYTES:
                self._rest = data
                return b""
            self._drop()
            self.num_blocks += 1
            end = len(data)
        if end == len(data):
            self._rest = b""
        else:
            data, self._rest = data[:end], data[end:]
        if data.startswith(_LINE) or b"\n: j " in data:
            data = self._stripped(data)
        if self.text is not None:
            data = self._read(self.text, data)
        self.num_blocks += data.count(separator)
        return data

    def _stripped(self, data: bytes) -> bytes:
        """``data`` without the lines of records, which are kept."""
        if data.count(_LINE) == 1 and data.startswith(_LINE):  # as good as always
            end = data.index(b"\n")
            self._keep(data[len(_LINE) : end])
            stripped = data[end + 1 :]
        else:
            self._keep(b" ".join(_LINES.findall(data)))
            stripped = _LINES.sub(b"", data)
        return data if self._keeps_lines else stripped

    def _read(self, text: ForeignText, data: bytes) -> bytes:
        """``data`` as the client shall see it, its text kept."""
        before = text.num_bytes
        data = text.feed(data, self._separator)
        if not self.is_dropped and not self._take(max(0, text.num_bytes - before)):
            text.stop()
            self._drop()
        return data

    def end(self) -> bytes:
        """What came after the last whole block of a stream that is complete."""
        rest, self._rest = self._rest, b""
        return self.text.feed(rest, self._separator) if rest and self.text is not None else rest

    def lost(self, *, is_fault: bool = True) -> bool:
        """The worker died, or its connection: what it had begun to send is void. ``is_fault``: not
        where the stream was moved on purpose. Whether this worker gave any block."""
        has_moved = self.num_blocks > self._seen
        self.kills = 0 if has_moved else self.kills + is_fault
        self._seen, self._rest = self.num_blocks, b""
        if self.text is not None:
            self.text.lost()
            self._separator = b"\n\n"
        return has_moved

    def restart(self, worker: Worker) -> None:
        """``worker`` is the first to answer after all; nothing was sent yet."""
        self.text = None
        self._digest = worker.facts.get("resume_digest")

    def can_resume(self, worker: Worker) -> bool:
        """Whether ``worker`` can go on: its answers are the first one's, token for token, or the
        text is enough, or nothing was sent yet."""
        if self.kills >= MAX_KILLS:
            return False
        if not self.num_blocks:
            return True
        if self.text is not None:
            return not self.is_dropped and self.text.can_resume(worker)
        if self.is_dropped or not self._records or self._digest is None:
            return False
        return bool(worker.facts.get("resume_digest") == self._digest)

    def resume_fields(self) -> dict[str, Any]:
        """The field that the body needs for the next worker. Put it before the last brace
        (``Call.overridden``): the client's body may have one."""
        if not self.num_blocks and not self.kills:
            return {}
        resume = self._asked
        if self.num_blocks:
            journal = self._records.decode("ascii", "replace").split()
            resume = resume | {"journal": journal, "num_events": self.num_blocks}
        return {"resume": resume | ({"kills": self.kills} if self.kills else {})}

    def close(self) -> None:
        """The stream has ended, or cannot be moved: give the memory back."""
        self._memory.used -= self._taken
        self._taken, self._records = 0, bytearray()

"""A tokenizer, and an HTTP server that sends scripted bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes import toy_tokenizer

from radixlm.text.tokenizer import Tokenizer, load_tokenizer

# the parts of an answer, sent one by one; None closes the connection
Script = Callable[[bytes, bytes], list[bytes | None]]


@dataclass
class Scripted:
    """A server on a free port. `seen`: (head, body) of each request."""

    script: Script = lambda head, body: [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]
    seen: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_connections: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head.lower())
                body = await reader.readexactly(int(length[1]) if length else 0)
                self.seen.append((head, body))
                for part in self.script(head, body):
                    if part is None:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[Scripted]:
    made = Scripted()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    built = toy_tokenizer.build("byte_level")
    toy_tokenizer.save(built, folder, chat_template="<user>{{ messages[0].content }}<bot>")
    return load_tokenizer(folder)

"""Web servers that say nothing hold only threads of their own: other requests of the same client
are answered meanwhile."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from tests.multimodal.app_server import PARTS, Served, file_of, make_image, part, served, user
from tests.multimodal.tiny import llava, save

NUM_SLOW = 60
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Hugging Face about tiny configs


async def _others(server: Served) -> list[int]:
    """Statuses of requests that need no web server."""
    image = make_image(40, 30)
    answers = [
        await server.chat([user("hi")], max_tokens=2),
        await server.chat([user("see ", part(image))], max_tokens=2),
        await server.post(
            "/generate",
            text="see <image>",
            image_data=[part(image)["image_url"]["url"]],
            sampling_params={"max_new_tokens": 2},
        ),
        await server.client.post(
            "/v1/files", files={"file": ("a.png", file_of(image))}, data={"purpose": "vision"}
        ),
        await server.client.get("/v1/files"),
        await server.client.get("/v1/batches"),
    ]
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/generate"])
async def test_silent_servers_take_no_threads_of_others(route: str, tmp_path: Path) -> None:
    save(llava(), tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_SLOW) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        chat = {"messages": [user("see ", part(url))], "max_tokens": 2}
        body = chat if route != "/generate" else {"text": "see <image>", "image_data": [url]}
        async with served(
            tmp_path / "model",
            PARTS.replace("PLACE", "<image>"),
            allow_local_media=("/",),
            file_storage_path=str(tmp_path / "files"),
        ) as server:
            assert await _others(server) == [200] * 6
            slow = [asyncio.ensure_future(server.post(route, **body)) for _ in range(NUM_SLOW)]
            answers = asyncio.ensure_future(_others(server))
            await asyncio.wait([answers, *slow], return_when=asyncio.FIRST_COMPLETED)
            assert answers.done() and not any(one.done() for one in slow)
            assert answers.result() == [200] * 6
            for one in slow:
                one.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            silent.close()  # hangs up on the fetches that run

"""The shell of the page: files, headers, addresses, themes, the key."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixlm.entrypoints.http import ui
from tests.end_to_end.server import RunningServer
from tests.ui.conftest import NewPage, sync_api

ROOT = Path(__file__).parents[2]
UI = ROOT / "src" / "radixlm" / "assets" / "ui"
expect = sync_api.expect


def test_every_view_opens(page: Any) -> None:
    for name in ("chat", "live", "tree", "play", "server", "docs"):
        page.goto(f"/ui/#/{name}")
        expect(page.locator(f"main.view-{name} h1").first).to_be_attached()
        expect(page.locator(".top nav a[aria-current]")).to_have_attribute("href", f"#/{name}")


def test_the_root_sends_browsers_to_the_page(page: Any, server: RunningServer) -> None:
    page.goto("/")
    expect(page).to_have_url(re.compile("/ui/$"))
    plain = httpx.get(server.url + "/")
    assert plain.status_code == 200 and "is running" in plain.text


def test_files_are_packed_and_revalidated(server: RunningServer) -> None:
    got = httpx.get(f"{server.url}/ui/main.js")
    assert got.headers["content-encoding"] == "gzip" and "import" in got.text
    assert got.headers["content-security-policy"].startswith("default-src 'none'")
    again = httpx.get(f"{server.url}/ui/main.js", headers={"If-None-Match": got.headers["etag"]})
    assert again.status_code == 304 and not again.content
    plain = httpx.get(f"{server.url}/ui/main.js", headers={"Accept-Encoding": "identity"})
    assert plain.content == (UI / "main.js").read_bytes()
    for path in ("/ui/../app.py", "/ui/%2e%2e/%2e%2e/__init__.py", "/ui/nothing.js"):
        assert httpx.get(server.url + path).status_code == 404
    assert httpx.get(server.url + "/favicon.ico").headers["content-type"].startswith("image/svg")


def test_names_that_are_no_files_are_not_kept() -> None:
    assert ui.answer("/ui/main.js", {})[0] == 200
    kept = ui._read.cache_info().currsize
    assert {ui.answer(f"/ui/no/{i}", {})[0] for i in range(50)} == {404}
    assert ui._read.cache_info().currsize == kept


def test_vendored_files_are_those_of_the_lock() -> None:
    subprocess.run([str(ROOT / "scripts" / "vendor_ui")], check=True, capture_output=True)
    lock = json.loads((UI / "vendor" / "lock.json").read_text())
    for name, facts in lock["packages"].items():
        if "tests only" not in facts["licence"]:
            assert f"LICENSE.{name}.txt" in lock["files"], name


def test_the_first_load_is_within_its_budget() -> None:
    lazy = {"katex.js"}  # loaded where an answer holds a formula
    files = [p for p in UI.rglob("*") if p.suffix in (".js", ".css", ".html", ".svg")]
    packed = {p.name: len(gzip.compress(p.read_bytes(), 9)) for p in files if p.name not in lazy}
    # views are loaded when opened; even all together fit
    assert sum(packed.values()) <= 250_000, packed
    first = ("index.html", "main.js", "store.js", "http.js", "messages.js", "app.css", "preact.js")
    assert sum(packed[name] for name in first) <= 40_000


def test_themes(new_page: NewPage) -> None:
    page = new_page(color_scheme="dark")
    page.goto("/ui/")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Change to light colours").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


@pytest.mark.parametrize(
    "path", sorted(UI.rglob("*.js")), ids=lambda p: p.relative_to(UI).as_posix()
)
def test_modules_import_only_files_that_are_there(path: Path) -> None:
    if "vendor" in path.parts:
        return
    text = path.read_text()
    for found in re.findall(r"""(?<![\w.])(?:from|import)\s*\(?\s*["']([^"']+)["']""", text):
        assert found.startswith("."), f"{found}: addresses are relative"
        assert (path.parent / found).is_file(), found
    assert "innerHTML" not in text and "style=" not in text

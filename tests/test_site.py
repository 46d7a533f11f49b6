"""The documentation as a site: every page is in the navigation, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
# what a browser loads by itself
LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
)


def test_pages_in_the_navigation_exist_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {page for page in LISTED if page.split("/")[0] in ("reference", "project", "examples")}
    assert set(LISTED) - made <= pages and len(made) == 9
    assert len(LISTED) == len(set(LISTED)) and len(LISTED) > 60


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_origin(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="pip install 'radixlm[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in LISTED} <= found
    for name in found:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert not LOADED.findall(text.replace('rel="canonical"', "")), name
    assert "async_generate" in (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    examples = (tmp_path / "examples" / "programs.html").read_text(encoding="utf-8")
    assert 'href="#openai_chatpy"' in examples and 'id="openai_chatpy"' in examples
    assert (tmp_path / "search" / "search_index.js").exists()  # found without a server

"""Hand-written pages are short to read and point to things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
GENERATED = {"api.md", "gateway-arguments.md", "models.md", "parsers.md", "server-arguments.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
MAX_WORDS = {"paragraph": 80, "item": 60, "cell": 60}
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
# `path/file.py`, `path/file.py: name`, `path/folder/`; a placeholder such as * is none
MENTION = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)(?:: ?([A-Za-z_]\w*)[^`]*|::(\w+))?`")
BASES = ("", "src/radixlm/", "docs/")
# first parts of paths that are folders of the repository or of src/radixlm
FOLDERS = {p.name for base in ("", "src/radixlm") for p in (ROOT / base).iterdir() if p.is_dir()}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, int, str]]:
    """(kind, line, text) of each paragraph, list item and table cell outside of code."""
    found: list[tuple[str, int, str]] = []
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"(?:^(?!#).*\S.*\n?)+", text, re.M):
        first = text.count("\n", 0, match.start()) + 1
        kind, start, words = "paragraph", first, list[str]()
        for number, line in enumerate(match.group().split("\n"), first):
            if line.startswith("|"):
                found += [("cell", number, cell) for cell in re.split(r"(?<!\\)\|", line)]
                continue
            if re.match(r"\s*(?:[-*]|\d+\.)\s", line):
                found.append((kind, start, " ".join(words)))
                kind, start, words = "item", number, []
            words.append(line)
        found.append((kind, start, " ".join(words)))
    return found


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_paragraphs_are_short(page: Path) -> None:
    long = [
        f"line {line}: {kind} of {len(text.split())} words"
        for kind, line, text in blocks(page.read_text(encoding="utf-8"))
        if len(text.split()) > MAX_WORDS[kind]
    ]
    assert not long, long


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), f"no {target}"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"no heading {anchor} in {target}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_and_names_that_are_mentioned_exist(page: Path) -> None:
    if page.parent.name == "adding":
        return  # walk-throughs name files that they make
    for path, *names in MENTION.findall(page.read_text(encoding="utf-8")):
        if path.split("/")[0] not in FOLDERS:
            continue
        found = [ROOT / base / path for base in BASES if (ROOT / base / path).exists()]
        assert found, f"no {path}"
        name = next(filter(None, names), "")
        if name and found[0].is_file():
            text = found[0].read_text(encoding="utf-8")
            assert re.search(rf"\b{name}\b", text), f"no {name} in {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_curl_commands_send_json(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\W*curl .*", text, re.M)
    wrong = [c for c in commands if re.search(r" (-d|--data) ", c) and "application/json" not in c]
    assert not wrong, "curl's -d sends a form: write --json"

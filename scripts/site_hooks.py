"""Hooks of mkdocs: pages from outside docs/, pages generated from the code, links between them."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
OUTSIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "zoo/README.md": "project/zoo.md",
    "examples/README.md": "examples/programs.md",
}
WORKER, WORKER_ORIGIN = "assets/iframe-worker.js", "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)")
EXPORTS = {
    "Engine": "radixlm.entrypoints.offline.Engine",
    "Answers": "radixlm.entrypoints.answers",
    "ServerArgs": "radixlm.config.server_args.ServerArgs",
    "SamplingParams": "radixlm.wire.sampling_params.SamplingParams",
    "Weights of a training program": "radixlm.weights_client",
    "Programs over models": "radixlm.lang.api",
    "Errors": "radixlm.base.errors",
}


def on_config(config: Any) -> Any:
    """Pages that the navigation does not list come at the end of its topics."""
    listed = set(re.findall(r"'([^']+\.md)'", repr(config.nav)))
    docs = ROOT / "docs"
    rest = sorted({path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - listed)
    topics = next(part["Topics"] for part in config.nav if "Topics" in part)
    if rest:
        topics.append({"More": rest})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    pages = {uri: (ROOT / path).read_text(encoding="utf-8") for path, uri in OUTSIDE.items()}
    pages["examples/programs.md"] += "".join(sources())
    pages["reference/python.md"] = python_page()
    pages["reference/metrics.md"] = "\n".join(metrics_page())
    pages["reference/environment.md"] = "\n".join(environment_page())
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    worker = (ROOT / "scripts" / "site_worker.js").read_text(encoding="utf-8")
    files.append(File.generated(config, WORKER, content=worker))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The script that lets search work in files comes from the site itself."""
    return output.replace(WORKER_ORIGIN, get_relative_url(WORKER, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for pages without Markdown."""
    return output_content.replace(WORKER_ORIGIN, f"/{WORKER}")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to pages of the site; other ones of the repository are text."""
    uri = page.file.src_uri
    origin = {to: path for path, to in OUTSIDE.items()}.get(uri, f"docs/{uri}")

    def replaced(match: re.Match[str]) -> str:
        is_image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        where = OUTSIDE.get(path) or path.removeprefix("docs/")
        if path in OUTSIDE or path.startswith("docs/"):
            to = posixpath.relpath(where, posixpath.dirname(uri) or ".")
            return f"{is_image}[{text}]({to}{anchor or ''})"
        if origin == "examples/README.md" and path.startswith("examples/"):
            return f"[{text}](#{posixpath.basename(path).replace('.', '')})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs names it
        return text if text.startswith("`") else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)


def sources() -> Iterator[str]:
    """The programs of examples/ as sections of one page; of a notebook its cells."""
    for path in sorted((ROOT / "examples").iterdir()):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if path.suffix == ".ipynb":
            cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
            text = "\n\n".join("".join(cell["source"]) for cell in cells) + "\n"
        if path.suffix in (".py", ".ts", ".ipynb"):
            language = "typescript" if path.suffix == ".ts" else "python"
            yield f"\n## {path.name}\n\n```{language}\n{text}```\n"


def python_page() -> str:
    """What `import radixlm` gives, for mkdocstrings."""
    parts = [f"## {title}\n\n::: {name}\n" for title, name in EXPORTS.items()]
    return (
        "# Python API\n\nNames of `import radixlm` are imported when first used.\n\n"
        + "\n".join(parts)
    )


def metrics_page() -> Iterator[str]:
    """Every metric of a server and of the gateway, from their registries."""
    ours = import_module("radixlm.observe.metrics")
    made = ours.Metrics({"model_name": "x"}, ours.Buckets(prompt=(1.0,), generation=(1.0,)))
    zeros = dict.fromkeys(ours.PAIR_GAUGES, 0.0)
    yield from ("# Metrics", "", "Written from the code; [the guide](../metrics.md) says how.", "")
    yield from ("## Of a server", "", "| metric | kind | what it tells |", "|---|---|---|")
    yield from families(made.exposition(zeros).decode())
    gateway = import_module("radixlm.router.metrics").RouterMetrics()
    yield from ("", "## Of a gateway", "", "| metric | kind | what it tells |", "|---|---|---|")
    yield from families(gateway.exposition().decode())


def families(text: str) -> Iterator[str]:
    """Rows of a table from the text that Prometheus reads."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    for name, told in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        if not name.endswith("_created"):
            yield f"| `{name}` | {kinds[name]} | {told} |"


def environment_page() -> Iterator[str]:
    """Every variable that the program reads."""
    yield from (
        "# Environment variables",
        "",
        "| variable | also as | what it does |",
        "|---|---|---|",
    )
    for one in import_module("radixlm.base.env").VARIABLES:
        aliases = ", ".join(f"`{name}`" for name in one.aliases)
        yield f"| `{one.name}` | {aliases} | {one.help} |"

"""Every example, the tutorial and docs/python.md run against real servers, and their asserts hold.

Examples whose packages are not installed are skipped; `scripts/test-clients` installs them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import radixlm
from tests.end_to_end.server import RunningServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = ROOT / "zoo" / "models"
PACKAGES = {  # file -> the packages that it imports
    "openai_chat.py": "openai",
    "openai_tools.py": "openai",
    "openai_structured.py": "openai",
    "openai_batches.py": "openai",
    "engine.py": "",
    "frontend_language.py": "",
    "langchain_chat.py": "langchain_openai",
    "instructor_records.py": "instructor",
    "chat.ipynb": "openai",
    "engine.ipynb": "",
}
WITH_MORE_SERVERS = {
    "openai_vision.py": "openai PIL",
    "rag.py": "openai httpx",
    "llamaindex_rag.py": "llama_index.embeddings.openai_like",
    "litellm_calls.py": "litellm",
}
CODE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
pytestmark = pytest.mark.filterwarnings("ignore")  # clients leave connections open


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of the bundled model."""
    files = str(tmp_path_factory.mktemp("files"))
    options = ("--max-total-tokens", "8192", "--file-storage-path", files)
    with RunningServer(*options) as server:
        yield server.url


@pytest.fixture(scope="module")
def more_urls() -> Iterator[dict[str, str]]:
    """The variables that name servers of an embedding and of a vision model."""
    models = {"RADIXLM_EMBED_URL": "radix-tiny-embed", "RADIXLM_VISION_URL": "radix-tiny-vl"}
    with ExitStack() as stack:
        urls = {}
        for name, model in models.items():
            server = RunningServer("--max-total-tokens", "8192", model=str(MODELS / model))
            urls[name] = stack.enter_context(server).url
        yield urls


@pytest.fixture(autouse=True)
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and its children; no backend stays set for other tests."""
    monkeypatch.setenv("RADIXLM_URL", url)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    monkeypatch.setattr(radixlm.global_config, "default_backend", None)


def is_there(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def run(name: str, packages: str) -> None:
    """Run an example; skip it where a package is missing."""
    missing = [one for one in packages.split() if not is_there(one)]
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}: run scripts/test-clients")
    if not name.endswith(".ipynb"):
        runpy.run_path(str(EXAMPLES / name))
        return
    if is_there("nbclient") and is_there("ipykernel"):
        import nbclient
        import nbformat

        book = nbformat.read(EXAMPLES / name, as_version=4)
        nbclient.NotebookClient(book, timeout=60, kernel_name="python3").execute()
        return
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    exec(compile(code, name, "exec"), {"__name__": "notebook"})  # without a kernel, here


@pytest.mark.parametrize(
    "name",  # the notebook of the engine shows little that engine.py does not
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "engine.ipynb")) for n in PACKAGES],
)
def test_example(name: str) -> None:
    run(name, PACKAGES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MORE_SERVERS)
def test_example_of_several_servers(
    name: str, more_urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, where in more_urls.items():
        monkeypatch.setenv(variable, where)
    run(name, WITH_MORE_SERVERS[name])


def test_typescript(tmp_path: Path) -> None:
    """`AI_SDK` names a folder with node_modules: ai, @ai-sdk/openai-compatible, zod, tsx."""
    packages = Path(os.environ.get("AI_SDK", "none"), "node_modules")
    if not (packages / "tsx").is_dir():
        pytest.skip("AI_SDK names no folder with node_modules: run scripts/test-clients")
    (tmp_path / "node_modules").symlink_to(packages)
    shutil.copy(EXAMPLES / "vercel_ai.ts", tmp_path / "vercel_ai.mts")
    command = ["node", str(packages / "tsx" / "dist" / "cli.mjs"), "vercel_ai.mts"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", ["tutorial.md", "python.md", "guides/application.md"])
def test_page(page: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of a page runs from top to bottom, and its curl lines are answered."""
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text.replace("http://127.0.0.1:30000", url)
    code = "\n".join(CODE.findall(text))
    assert code
    exec(compile(code, page, "exec"), {"__name__": "page"})
    shown = capsys.readouterr().out
    for command in re.findall(r"^curl .*", text, re.M) if shutil.which("curl") else ():
        ran = subprocess.run(
            [*command.split(" '")[0].split(), command.split("'")[1]],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        shown += ran.stdout
        assert '"content":"42"' in ran.stdout
    if page == "tutorial.md":
        assert shown.count("42") >= 4 and '"Anna"' in shown


def test_the_fields_of_models_are_those_that_are_told(url: str) -> None:
    text = (ROOT / "docs" / "guides" / "application.md").read_text(encoding="utf-8")
    table = text.split("`GET /v1/models` lists")[1].split("\n\n")[1]
    told = {
        name for row in table.split("\n")[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert told == card.keys() and card["id"] == "radix-tiny" and card["max_model_len"] == 4096
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert {"tokenizer_class", "chat_template", "eos_token"} <= info.keys()


def test_every_example_is_listed_and_short() -> None:
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert names == {*PACKAGES, *WITH_MORE_SERVERS, "vercel_ai.ts"}
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if f"]({name})" in text} == names
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ts"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name

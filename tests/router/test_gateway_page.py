"""docs/gateway.md: its flags, routes, policies, states and metrics are there."""

import re
from pathlib import Path

from radixlm.config.option import options as server_options
from radixlm.router.app import Gateway
from radixlm.router.options import Options, table
from radixlm.router.worker import State

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
TEXT = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
METHODS = r"(?:GET|POST|PUT|DELETE)"


def _rows(heading: str) -> set[str]:
    """The words in code of the first column of the table below ``heading``."""
    found = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in found.splitlines()[2:]]
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_flags() -> None:
    known = {name for one in table().values() for name in (one.dashed, *one.flag.aliases)}
    served = {one.dashed for one in server_options().values()}
    known |= served | {name.replace("--", "--router-") for name in known} | {"--set"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert len(named) > 30 and named <= known, named - known


def test_routes() -> None:
    gateway = Gateway(Options(prometheus_port=-1))
    pairs = set()
    for code in re.findall(r"`([^`]+)`", TEXT):
        for methods, path in re.findall(rf"((?:{METHODS}(?:, )?)+) (/\S+)", code):
            pairs |= {(method, path) for method in methods.split(", ")}
    assert len(pairs) >= 8
    for method, path in pairs:
        concrete = re.sub(r"\{\w+\}", "x", path)
        is_data = method == "POST" and concrete in gateway.data_routes
        assert is_data or method in gateway.routes.methods(concrete), (method, path)


def test_tables() -> None:
    assert _rows("state") == {str(state) for state in State}
    assert _rows("policy") == set(table()["prefill_policy"].flag.choices or ())
    assert _rows("`--history-backend`") == set(table()["history_backend"].flag.choices or ())


def test_metrics_have_the_prefixes_of_the_page() -> None:
    text = Gateway(Options(prometheus_port=-1)).metrics.exposition().decode()
    names = set(re.findall(r"# TYPE (\w+)", text))
    prefixes = tuple(word.rstrip("*") for word in _rows("names"))
    assert len(names) > 40 and all(name.startswith(prefixes) for name in names)

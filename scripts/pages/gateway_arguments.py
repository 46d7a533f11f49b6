"""docs/gateway-arguments.md, written from the flags (``scripts/docs``)."""

from collections.abc import Iterator
from itertools import groupby

from scripts.pages.server_arguments import HEAD, row

from radixlm.router.options import ENVIRONMENT, table

_INTRO = """\
# Arguments of the gateway

<!-- Written by `scripts/docs`; edit the flags. -->

Every flag of sglang-router 0.3.2, with its default, and our own. `radixlm router --help` prints the
same list. Lists take their values after one flag: `--worker-urls http://a:30001 http://b:30001`.

`radixlm router --launch-servers 2 --model-path ...` starts the servers too. Then the flags are
those of `radixlm serve`, and the gateway's begin with `--router-`, as in `--router-policy random`;
`--host` and `--port` are the gateway's.
"""


def _lines() -> Iterator[str]:
    yield _INTRO
    for group, options in groupby(table().values(), lambda one: one.group):
        yield f"## {group.rstrip('.')}\n"
        yield from HEAD
        yield from map(row, options)
        yield ""
    yield "## Environment variables\n"
    yield "Each sets an option where its flag is not given.\n"
    yield "| variable | flag |"
    yield "|---|---|"
    for name, variable in ENVIRONMENT.items():
        yield f"| `{variable}` | `{table()[name].dashed}` |"


def render() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


if __name__ == "__main__":
    print(render(), end="")

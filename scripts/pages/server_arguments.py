"""docs/server-arguments.md, written from the options (``scripts/docs``)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from radixlm.base.env import VARIABLES
from radixlm.config.deprecated import DEPRECATED
from radixlm.config.groups import GROUPS
from radixlm.config.newer import NEWEST, OLDEST, newer_flags
from radixlm.config.option import Option, options
from radixlm.config.values import show

_INTRO = """\
# Server arguments

<!-- Written by `scripts/docs`; edit the options. -->

Every flag of SGLang 0.5.2 is accepted, and some more; those that came later, up to 0.5.23, are
known by name (below). `radixlm serve --help-all` prints the same list.

Lists take their values after one flag: `--cuda-graph-bs 1 2 4`. Switches are written
`--enable-metrics` or `--no-enable-metrics`. The beginning of a flag that begins no other stands for
it.

`--config FILE` reads flags from a YAML file, with dashes or underscores; a flag on the command line
wins over the file:

```yaml
model-path: /models/qwen3-0.6b
port: 30000
enable-metrics: true
```

The offline engine takes the same names: `Engine(model_path="/models/qwen3-0.6b", page_size=16)`.

State of a flag:

- **works**: it does what the table says. "only a, b" lists the values that work today.
- **no-op**: it is accepted and changes no result; a log line says why.
- **planned**: the feature is not built. Any value but the default stops the server at start, with
  an error that says what is missing. A detail of another flag stops it only together with that
  flag (`--max-loras-per-batch 4` alone has no effect).
"""


HEAD = ("| flag | what it does | default | state |", "|---|---|---|---|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _state(option: Option) -> str:
    flag = option.flag
    if flag.state == "no-op":
        return f"no-op: {flag.why}"
    if flag.state == "planned":
        return f"planned: needs {flag.needs}"
    if flag.built is None:
        return "works"
    if flag.why:
        return f"works: only {', '.join(map(str, flag.built))}; no-op else: {flag.why}"
    if not flag.built:
        return f"planned: needs {flag.needs}"
    return f"works: only {', '.join(map(str, flag.built))}; the rest needs {flag.needs}"


def _description(option: Option) -> str:
    text = option.help
    if option.flag.allowed:
        text += f" One of {', '.join(f'`{choice}`' for choice in option.flag.allowed)}."
    if option.flag.within:
        text += f" Range {option.flag.within}."
    return text


def row(option: Option) -> str:
    """The option's row: flag, what it does, default, state."""
    names = "<br>".join(f"`{name}`" for name in (option.dashed, *option.flag.aliases))
    cells = (names, _description(option), show(option, option.default), _state(option))
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _group(name: str) -> Iterator[str]:
    yield f"\n## {(GROUPS[name].__doc__ or name).rstrip('.')} (`config.{name}`)\n"
    yield from HEAD
    for option in options().values():
        if option.group == name:
            yield row(option)


def _old() -> Iterator[str]:
    yield "\n## Old flags\n"
    yield "Accepted with one line of warning.\n"
    yield "| flag | today |"
    yield "|---|---|"
    for key, renamed in DEPRECATED.items():
        to = "--" + renamed.to.replace("_", "-")
        value = (
            f"the value of --{renamed.like.replace('_', '-')}" if renamed.like else renamed.value
        )
        today = f"`{to}` {value or ''}".rstrip() if renamed.to else f"nothing: {renamed.note}"
        yield f"| `--{key.replace('_', '-')}` | {_cell(today)} |"
    for option in options().values():
        for old, new in option.flag.old_values:
            yield f"| `{option.dashed} {old}` | `{option.dashed} {new}` |"


def _newer() -> Iterator[str]:
    table = newer_flags()
    yield f"\n## Newer flags of SGLang, up to {NEWEST}\n"
    yield f"{len(table)} names that SGLang {OLDEST} does not have; the others are above. A flag"
    yield "that is refused stops the start unless its value asks for nothing.\n"
    yield "| flag | what becomes of it |"
    yield "|---|---|"
    for key, flag in table.items():
        if flag.to:
            options = [name.replace("_", "-") for name in (flag.to, flag.switch) if name]
            today = "mapped to " + " and ".join(f"`--{option}`" for option in options)
        elif flag.why:
            today = f"no-op: {flag.why}"
        else:
            today = f"refused, newer than what is built: {flag.what}"
        yield f"| `--{key.replace('_', '-')}` | {_cell(today)} |"


def _environment() -> Iterator[str]:
    yield "\n## Environment variables\n"
    yield "| variable | what it does | default |"
    yield "|---|---|---|"
    for variable in VARIABLES:
        names = "<br>".join(f"`{name}`" for name in (variable.name, *variable.aliases))
        default = str(variable.default).replace(str(Path.home()), "~")
        yield f"| {names} | {_cell(variable.help)} | {default} |"


def render() -> str:
    """The whole page."""
    states = Counter(_state(option).partition(":")[0] for option in options().values())
    counts = ", ".join(f"{states[state]} {state}" for state in ("works", "no-op", "planned"))
    lines = [_INTRO, f"{len(options())} options: {counts}."]
    for name in GROUPS:
        lines += _group(name)
    return "\n".join([*lines, *_old(), *_newer(), *_environment()]) + "\n"


if __name__ == "__main__":
    print(render(), end="")

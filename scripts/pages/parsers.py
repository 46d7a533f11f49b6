"""docs/parsers.md, written from the tables of parsers (``scripts/docs``)."""

from radixlm.text.reasoning.table import MARKERS
from radixlm.text.tools.table import FORMATS

_HEAD = """# Parsers

Generated from the code by `scripts/docs`.

Both kinds of parsers return the same result for any split of a message into chunks. `auto` picks
one by the model's chat template; it recognizes the formats marked "auto". A message that does not
follow its format is returned as text, character for character.

## Tool calls (`--tool-call-parser`)

"special": the markers are special tokens of the model, so a request with tools keeps special
tokens in its text. "strict": how the schema of a function marked strict is enforced when the tool
choice is `auto`. A forced call (`required`, or a named function) is enforced by a grammar in every
format: in the format itself for the Hermes-like ones, as a JSON array for all others.

| name | a call | special | auto | strict |
|---|---|---|---|---|
"""
_REASONING_HEAD = """
## Reasoning (`--reasoning-parser`)

"begins inside": a message begins with reasoning even without a start marker, unless its prompt
ends with an end marker. Every parser begins inside if the prompt ends with a start marker.
"left at": markers that end the reasoning and stay in the text. "switch": the variable of the chat
template that turns thinking on and off, and its default.

| name | start | end | left at | begins inside | special | auto | switch |
|---|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    return _HEAD + "".join(_tool_rows()) + _REASONING_HEAD + "".join(_reasoning_rows())


def _tool_rows() -> list[str]:
    return [
        _row(
            _code(name),
            _code(entry.example),
            _mark(entry.is_special),
            _mark(bool(entry.hints)),
            "structural tag" if entry.structure else "",
        )
        for name, entry in FORMATS.items()
    ]


def _reasoning_rows() -> list[str]:
    return [
        _row(
            _code(name),
            _codes(entry.starts),
            _codes(entry.ends),
            _codes(entry.breaks),
            _mark(entry.is_inside),
            _mark(entry.is_special),
            _mark(bool(entry.hints)),
            f"`{entry.template_variable}` ({'on' if entry.is_on_by_default else 'off'})"
            if entry.template_variable
            else "",
        )
        for name, entry in MARKERS.items()
    ]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("\n", "\\n")


def _codes(texts: tuple[str, ...]) -> str:
    return ", ".join(map(_code, texts))


def _mark(value: bool) -> str:
    return "yes" if value else ""


if __name__ == "__main__":
    print(render(), end="")

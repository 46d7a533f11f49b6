"""How large the terminals of a Lark grammar become when they are put into each other."""

import re
from graphlib import CycleError, TopologicalSorter

MAX_SIZE = 1 << 18  # of one terminal: a quarter of a second of llguidance's compiler
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*) | (?P<literal>"(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/)
    | ^[?!]?(?P<defined>[A-Za-z_]\w*)(?:\.\d+|\[[^\]\n]*\]|\{[^}\n]*\})*[ \t]*:
    | (?P<used>[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE | re.ASCII,
)


def largest_terminal(lark: str) -> int:
    """Literals of the largest terminal once each name in it stands for what it means; 0 if
    terminals refer to each other in a ring, which no compiler takes."""
    uses: dict[str, list[str]] = {}
    inside: list[str] = []
    for match in _TOKEN.finditer(lark):
        if name := match["defined"]:
            inside = uses.setdefault(name, []) if name.isupper() else []
        elif match["literal"] or match["used"]:
            inside.append(match[0])
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(uses).static_order():
            sizes[name] = sum(sizes[used] for used in uses.get(name, ())) or 1
    except CycleError:
        return 0
    return max(sizes.values(), default=0)

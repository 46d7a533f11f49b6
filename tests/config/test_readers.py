"""Every option in state "works" is read somewhere, so no flag is ignored silently."""

from __future__ import annotations

import re
from pathlib import Path

import radixlm
from radixlm.config.option import Option, options

SOURCE = Path(radixlm.__file__).parent

WITHOUT_READER = frozenset(
    """
    model_impl
    """.split()
)
"""Options that claim to work although nothing reads them yet. Only ever remove names from here:
a new option gets its reader, or the state "planned", in the same change."""


def has_a_choice(option: Option) -> bool:
    """Whether more than one value of a working option is supported."""
    flag = option.flag
    return flag.state == "works" and (flag.built is None or len(flag.built) > 1)


def test_every_working_option_is_read_somewhere() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / "config"
    )
    read = set(re.findall(r"\.([a-z][a-z0-9_]*)\b", text))
    working = {name for name, option in options().items() if has_a_choice(option)}
    assert working - read - WITHOUT_READER == set()
    assert working >= WITHOUT_READER

"""The options: types from annotations, unique names, well-formed states."""

from __future__ import annotations

from typing import Annotated

import pytest

from radixlm.config import option as table
from radixlm.config.flag import Flag
from radixlm.config.option import Option, names, option, options
from radixlm.config.values import coerce, is_within


def test_types_are_read_from_annotations() -> None:
    assert option("g", "a", Annotated[int | None, "h"], None).kind is int
    many = option("g", "a", Annotated[tuple[float, ...] | None, "h", Flag(("--b",))], None)
    assert (many.kind, many.is_many, many.is_nullable) == (float, True, True)
    assert many.flag.aliases == ("--b",)
    with pytest.raises(TypeError, match="no option can have the type"):
        option("g", "a", Annotated[dict[str, int], "h"], None)


def test_two_groups_cannot_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = next(iter(table.GROUPS.values()))
    monkeypatch.setattr(table, "GROUPS", {"one": owner, "two": owner})
    with pytest.raises(TypeError, match="model_path stands in one and in two"):
        table.options.__wrapped__()


def test_two_options_cannot_share_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Option("a", "g", int, False, 1, "h", Flag(("--x",)))
    second = Option("b", "g", int, False, 1, "h", Flag(("--x",)))
    monkeypatch.setattr(table, "options", lambda: {"a": first, "b": second})
    with pytest.raises(TypeError, match="--x names a and b"):
        table.names.__wrapped__()


@pytest.mark.parametrize("one", options().values(), ids=options().keys())
def test_every_option_is_well_formed(one: Option) -> None:
    flag = one.flag
    assert one.help.strip().endswith((".", "}.", ":"))
    assert set(flag.built or ()) <= set(flag.allowed)
    assert bool(flag.why) == (flag.state == "no-op" or (flag.built is not None and not flag.needs))
    if flag.state == "planned" or flag.built is not None:
        assert flag.needs or flag.why
    assert set(flag.part_of) <= set(options())
    assert one.default in (None, ()) or coerce(one, one.default) == one.default
    if flag.within and one.default is not None:
        assert is_within(one.default, flag.within)
    if one.default is not None and flag.built is not None:
        assert one.default in flag.built
    if one.is_many:
        assert one.default in (None, ())


def test_every_alias_finds_its_option() -> None:
    for name, one in options().items():
        for alias in one.flag.aliases:
            assert names()[alias[2:].replace("-", "_")] == name


def test_default_type_matches_annotation() -> None:
    for one in options().values():
        if one.default not in (None, ()):
            assert type(one.default) is one.kind, one.name

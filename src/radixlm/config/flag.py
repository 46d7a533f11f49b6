"""Properties of an option besides its type and default.

A group writes ``name: Annotated[type, "help", Flag(...)] = default``. The type is one of bool, int,
float, str, ``X | None`` or ``tuple[X, ...]``; the flag is ``--name`` with dashes for underscores.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal

from radixlm.base.lazy import load

State = Literal["works", "no-op", "planned"]

AUTO: Any = None
"""Default of an option that ``resolve`` always fills: typed as its final value, None until then."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Names, limits and state of one option.

    works    the value does what the help says.
    no-op    accepted, changes no result; ``why`` gives the reason, which is logged. With ``built``
             and ``why``, that holds for the choices that are not built.
    planned  not built: a value other than the default is a ConfigError that quotes ``needs``.
    """

    aliases: tuple[str, ...] = ()
    state: State = "works"
    needs: str = ""
    why: str = ""
    choices: tuple[str | int, ...] | str = ()
    """The values that are allowed, or the "module:attr" that holds them; read ``allowed``."""
    built: tuple[str | int, ...] | None = None
    """The choices that work today; None means all. The others are ``planned``."""
    within: str = ""
    """Interval of a number, such as "[1, inf)" or "(0, 1)"."""
    const: Any = None
    """Value of the flag when it is written without one."""
    is_json: bool = False
    """The text must be a JSON object; YAML and keyword arguments may give a mapping."""
    may_be_file: bool = False
    """With ``is_json``: "@" and the path of a file with the object will do."""
    is_secret: bool = False
    """Never printed: neither in logs, nor by ``flat``, nor in /get_server_info."""
    is_repeatable: bool = False
    """Each occurrence adds one value; otherwise the flag takes all its values at once."""
    only_device: str = ""
    """Device on which the option has an effect; elsewhere a log line says that it has none."""
    part_of: tuple[str, ...] = ()
    """Options that switch on what this one is a detail of: unless one of them is set, a value has
    no effect, and does not stop the start."""
    old_values: tuple[tuple[str, str], ...] = ()
    """(old, new) pairs of values that were renamed; the old one is accepted with a warning."""

    @property
    def allowed(self) -> tuple[str | int, ...]:
        """The choices; () where any value is allowed."""
        return load(self.choices) if isinstance(self.choices, str) else self.choices


def no_op(why: str, within: str = "") -> Flag:
    """Of an option that changes no result."""
    return Flag(state="no-op", why=why, within=within)


NON_NEGATIVE = "[0, inf)"
POSITIVE = "[1, inf)"
ABOVE_ZERO = "(0, inf)"


class Group:
    """Base class of the groups: equality, hash and a short repr.

    Written by hand: generating them with dataclass for each group costs 10 ms at start.
    """

    __slots__ = ()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._values() == self._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        """Only what differs from the default; secrets stay out."""
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if field.repr and getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({changed})"

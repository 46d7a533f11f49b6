"""The header of a Harmony message, for the tool and the reasoning parser of gpt-oss.

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>...<|call|>

The generation prompt ends with ``<|start|>assistant``, so the first message begins with its
channel. The recipient follows the role or the channel.
"""

import re

from radixlm.base.record import Record
from radixlm.text.tools.scan import Malformed, Scanner, Step

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "analysis"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([A-Za-z_]+)")
_MAX_HEADER_CHARS = 256
_TRUNCATED_HEADER = re.compile(
    r"(?:\s*(?:<\|(?:start|channel|constrain)\|>|assistant|analysis|commentary|final|json"
    r"|to=[\w.:-]+))+\s*(?:<\|?[a-z]*\|?|[a-z]{0,10}|to=)"
)


class Header(Record):
    """``function``: the tool the message is addressed to. ``raw``: the text of the header."""

    channel: str
    function: str | None
    raw: str


def drop_truncated_header(scanner: Scanner) -> None:
    """The message ended inside a header: drop the header; anything else is text."""
    scanner.rewind()
    rest = scanner.buffer[scanner.position :]
    if _TRUNCATED_HEADER.fullmatch(rest):
        scanner.take(len(rest))
        scanner.commit()


def read_header(scanner: Scanner, marker: str) -> Step[Header]:
    """Read the header after ``marker`` (START or CHANNEL), including ``<|message|>``."""
    text = marker + (yield from scanner.until(MESSAGE, _MAX_HEADER_CHARS))
    channel = _CHANNEL_NAME.search(text)
    if any(end in text for end in ENDS) or text.count(CHANNEL) > 1:
        raise Malformed
    recipient = _RECIPIENT.search(text)
    function = recipient.group(1).removeprefix("functions.") if recipient else None
    if function in ("", "user", "assistant"):
        function = None
    return Header(channel.group(1) if channel else "", function, text + MESSAGE)

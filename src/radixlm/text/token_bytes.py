"""The bytes of a token: byte-level BPE, sentencepiece with byte fallback, WordPiece.

``Decoder`` is read from the decoder of a ``tokenizers`` tokenizer; ``token_bytes`` returns
the bytes that a token adds in the middle of a text. The bytes of several tokens join to the text,
except that a decoder may drop a leading space at its start.
"""

from __future__ import annotations

import json
import re
from typing import Any

from radixlm.base.record import Record

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """The reversible alphabet of byte-level BPE: a printable character for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_level_alphabet()


class Decoder(Record):
    """The steps of a decoder that apply to single tokens.

    ``is_byte_level``: the text is the joined bytes of all tokens, nothing else.
    ``is_generic``: the decoder has a step that this record cannot express, so it must be called.
    """

    is_byte_level: bool = False
    is_generic: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    word_prefix: str | None = None  # WordPiece: "##" continues a word, everything else starts one
    word_suffix: str | None = None  # BPE with "</w>" at the end of a word
    is_spaced: bool = False  # no decoder: tokens are joined with spaces

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Decoder:
        """Read the serialized decoder of a tokenizer; None means it has none."""
        if text is None:
            return cls(is_spaced=True)
        return _read(json.loads(text))

    def token_bytes(self, token: str, is_added: bool) -> bytes:
        """The bytes of ``token`` in the middle of a text."""
        if self.is_byte_level:
            return _byte_level_bytes(token, is_added)
        if self.has_byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match.group(1))
        if self.word_prefix is not None and not is_added:
            continues = token.startswith(self.word_prefix)
            token = token.removeprefix(self.word_prefix) if continues else " " + token
        if self.word_suffix:
            token = token.replace(self.word_suffix, " ")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return ((" " if self.is_spaced else "") + token).encode("utf-8", "replace")

    def is_fallback_byte(self, token: str) -> bool:
        """Whether ``token`` is one byte of a run that is decoded as a whole ("<0xE4>")."""
        return self.has_byte_fallback and _BYTE_TOKEN.match(token) is not None


def _byte_level_bytes(token: str, is_added: bool) -> bytes:
    try:
        data = bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
    if is_added:
        try:
            data.decode()
        except UnicodeDecodeError:  # "é" was added as text, not as the byte 0xE9
            return token.encode()
    return data


def _read(node: dict[str, Any]) -> Decoder:
    steps = node["decoders"] if node["type"] == "Sequence" else [node]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        plain = all(kind in ("ByteLevel", "Fuse") for kind in kinds)
        return Decoder(is_byte_level=True, is_generic=not plain)
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
    return Decoder(
        is_generic=not known.issuperset(kinds),
        has_byte_fallback="ByteFallback" in kinds,
        replacements=tuple(pair for step in steps for pair in _replacements(step)),
        word_prefix=_first(steps, "WordPiece", "prefix"),
        word_suffix=_first(steps, "BPEDecoder", "suffix"),
    )


def _replacements(step: dict[str, Any]) -> list[tuple[str, str]]:
    if step["type"] == "Metaspace":
        return [(step.get("replacement", "▁"), " ")]
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return [(step["pattern"]["String"], step["content"])]
    return []


def _first(steps: list[dict[str, Any]], kind: str, key: str) -> str | None:
    return next((step[key] for step in steps if step["type"] == kind), None)

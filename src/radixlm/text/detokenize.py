"""Token ids to text, incrementally.

The deltas of ``feed`` and ``finish`` join to exactly ``Tokenizer.decode`` of all ids. No delta
ends inside a character, and U+FFFD is sent only when the bytes before it can never become one.

Byte-level tokenizers: the text is the joined bytes of the tokens, read by an incremental UTF-8
decoder. All others: the text of (context + new tokens) minus the text of the context, which is the
shortest run of earlier tokens that has any text: decoders depend on the previous token at most, and
on the start of the text.
"""

import codecs
from collections.abc import Iterable, Sequence

from radixlm.text.tokenizer import Tokenizer, check_ids

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_PROMPT_TOKENS = 16


class Detokenizer:
    """The text of one growing sequence of token ids. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """``prompt_ids`` precede the text and are not part of it. With them a text keeps a leading
        space, which a sentencepiece decoder drops at the start of a text."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._spaces = spaces_between_special_tokens
        decoder = tokenizer.decoder
        self._utf8 = _UTF8("replace") if decoder.is_byte_level and not decoder.is_generic else None
        self._context: list[int] = []
        self._context_chars = 0  # length of the text of the context
        self._pending: list[int] = []  # tokens whose text is held back
        self._begin_after([i for i in prompt_ids[-_PROMPT_TOKENS:] if i not in self._skipped])

    def _begin_after(self, prompt_ids: list[int]) -> None:
        if self._utf8 is not None:  # a character may have begun in the prompt
            self._utf8.decode(b"".join([self._tokenizer.bytes_by_id[i] for i in prompt_ids]))
        elif prompt_ids:
            self._keep_context(prompt_ids, self._text(prompt_ids))

    def feed(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` add, as far as no later token can change it."""
        if self._skipped:
            ids = [i for i in ids if i not in self._skipped]
        if self._utf8 is not None:
            table = self._tokenizer.bytes_by_id
            return self._utf8.decode(b"".join([table[i] for i in ids]))
        return self._feed_window(ids)

    def finish(self) -> str:
        """The text that was held back; the detokenizer is empty afterwards."""
        if self._utf8 is not None:
            text = self._utf8.decode(b"", True)
            self._utf8.reset()
            return text
        text = self._text(self._context + self._pending)[self._context_chars :]
        self._context, self._context_chars, self._pending = [], 0, []
        return text

    def _feed_window(self, ids: Iterable[int]) -> str:
        self._pending.extend(check_ids(list(ids)))
        num_ready = self._num_ready()
        if num_ready == 0:
            return ""
        window = self._context + self._pending[:num_ready]
        text = self._text(window)
        if self._tokenizer.decoder.is_generic and text.endswith(_REPLACEMENT):
            return ""  # an unknown decoder: the character may still be completed
        delta = text[self._context_chars :]
        self._keep_context(window, text)
        del self._pending[:num_ready]
        return delta

    def _num_ready(self) -> int:
        """Pending tokens before an open run of fallback bytes, which is decoded as a whole."""
        num_ready = len(self._pending)
        while num_ready > 0:
            piece = self._tokenizer.id_to_piece(self._pending[num_ready - 1])
            if piece is not None and not self._tokenizer.decoder.is_fallback_byte(piece):
                break
            num_ready -= 1
        return num_ready

    def _keep_context(self, window: list[int], text: str) -> None:
        """Keep the shortest tail that has text: earlier tokens no longer matter."""
        size = 1
        while size < len(window):
            tail = self._text(window[-size:])
            if tail:
                window, text = window[-size:], tail
                break
            size *= 2
        self._context, self._context_chars = window, len(text)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, False, self._spaces)

"""Text to token ids and back for one checkpoint, without torch and mostly without transformers.

``load_tokenizer`` reads ``tokenizer.json`` with the tokenizers library and completes it from
``tokenizer_config.json`` and ``special_tokens_map.json`` as Hugging Face does: missing added
tokens, the special flag of named tokens, and BOS / EOS around a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest
from radixlm.base.lazy import load, require_transformers
from radixlm.base.tokenizer_files import has_tokenizer
from radixlm.text.normalizer import MAX_GROWTH, growth, has_repeated_groups
from radixlm.text.token_bytes import Decoder

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MODES = ("auto", "slow")
# file in the folder of an unpacked GGUF file that says why it has no tokenizer.json
TOKENIZER_PROBLEM = "tokenizer.problem"
MAX_TOKEN_ID = (1 << 32) - 1


class Backend(Protocol):
    """The methods of ``tokenizers.Tokenizer`` that are used; unknown ids decode to nothing."""

    def encode_batch_fast(self, input: list[Any], *, add_special_tokens: bool = True) -> Any:
        """Objects with ``.ids`` and ``.type_ids``, one per text or pair of texts."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]: ...


class _TokenTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use: a large vocabulary costs nothing at start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._tokenizer.compute_token_bytes(token_id)
        return data


class Tokenizer:
    """A checkpoint's tokenizer. Not changed after a start, and safe to share between threads.

    ``special_tokens`` are the named ones as chat templates see them ("bos_token" -> "<s>").
    ``chat_templates`` are the Jinja sources by name ("default", "tool_use", ...).
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        special_tokens: Mapping[str, Any],
        chat_templates: Mapping[str, str],
    ) -> None:
        self.backend = backend
        self.decoder = decoder
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.pads_to = 0  # tokens up to which ``encode`` fills texts with the padding token
        self.bytes_by_id = _TokenTable(self)

    @cached_property
    def may_be_slow(self) -> bool:
        """Whether a short text may take long: a pattern repeats a group."""
        if not isinstance(self.backend, tokenizers.Tokenizer):
            return False
        parts = (self.backend.normalizer, self.backend.pre_tokenizer)
        return has_repeated_groups(*(json.loads(p.__getstate__()) for p in parts if p is not None))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        size = max(self.backend.get_vocab_size(), *(i + 1 for i in self.added_ids), 0)
        while self.backend.id_to_token(size) is not None:  # the vocabulary has gaps
            size += 1
        return size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` also the model's BOS / EOS.

        A lone surrogate becomes U+FFFD; anything but a string raises InvalidRequest.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Iterable[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """``encode`` of each text, in parallel."""
        clean = [clean_text(text) for text in texts]
        with _panics_as_errors():
            encodings = self.backend.encode_batch_fast(clean, add_special_tokens=add_special_tokens)
        rows = [encoding.ids for encoding in encodings]
        pad = self._named_id("pad_token") if self.pads_to else None
        return rows if pad is None else [row + [pad] * (self.pads_to - len(row)) for row in rows]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """(token ids of two texts joined as the model expects, number of ids before the first with
        token type 1: 0 if there is none)."""
        pair = (clean_text(first), clean_text(second))
        with _panics_as_errors():
            encoding = self.backend.encode_batch_fast([pair], add_special_tokens=True)[0]
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ``ids``. Unknown ids give nothing.

        Only Python tokenizers (no tokenizer.json) put spaces between special tokens, as in
        Hugging Face; for all others ``spaces_between_special_tokens`` makes no difference.
        """
        ids = check_ids(ids)
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        if self.decoder.is_byte_level and not self.decoder.is_generic:
            table = self.bytes_by_id
            return b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        if not spaces_between_special_tokens and isinstance(self.backend, PythonBackend):
            return self.backend.decode_unspaced(ids)
        try:
            return self.backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            if not _is_panic(error):
                raise
            return b"".join(self.bytes_by_id[i] for i in ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text; U+FFFD for a part of a character."""
        return self.bytes_by_id[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; b"" if there is no such token."""
        return self.bytes_by_id[token_id]

    def compute_token_bytes(self, token_id: int) -> bytes:
        """``token_bytes`` without the table."""
        token = self.id_to_piece(token_id)
        if token is None:
            return b""
        return self.decoder.token_bytes(token, token_id in self.added_ids)

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġhello"), None if there is no such token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None

    def token_id(self, piece: str) -> int | None:
        """The id of a token by its vocabulary name ("<|im_end|>"), None if there is none."""
        return self.backend.token_to_id(piece)

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` drops the token."""
        return token_id in self.special_ids

    def chat_template(self, name: str | None = None, has_tools: bool = False) -> str | None:
        """The template called ``name``; by default "tool_use" with tools, else "default"."""
        if name is not None:
            return self.chat_templates.get(name)
        if has_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        return self.chat_templates.get("default")

    @property
    def added_bos(self) -> str:
        """The text of the BOS token if ``encode`` adds it, else ""."""
        token = self.special_tokens.get("bos_token")
        if token is None or self.encode("a")[:1] != [self._named_id("bos_token")]:
            return ""
        return str(token)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self.backend.token_to_id(token) if token is not None else None


def _is_panic(error: BaseException) -> bool:
    """Whether the library has found a fault of its own, which it does not raise as an Exception."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """The library panics where a regular expression exceeds its limit of steps."""
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        message = f"text: the tokenizer cannot read it: {str(error)[:200]}"
        raise InvalidRequest(message, "text") from None


def clean_text(text: Any) -> str:
    """``text`` with joined surrogate pairs and U+FFFD for lone ones; InvalidRequest if no str."""
    if not isinstance(text, str):
        raise InvalidRequest(f"text must be a string, got {type(text).__name__}", "text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def check_ids(ids: Sequence[int]) -> Sequence[int]:
    """``ids`` unchanged; InvalidRequest if one cannot be a token id."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest(f"{token!r:.40} is not a token id", "input_ids")
    return ids


def load_tokenizer(
    folder: str | Path, mode: str = "auto", trust_remote_code: bool = False
) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder (or of one .gguf file).

    ``mode`` "auto" reads tokenizer.json, else Mistral's tekken.json; "slow", or a folder without
    these files, uses transformers.
    ConfigError: unknown mode or a missing package; CheckpointError: missing or broken files.
    """
    folder = Path(folder)
    if mode not in MODES:
        raise ConfigError(
            f"--tokenizer-mode {mode!r} is unknown; choose one of: {', '.join(MODES)}"
        )
    config = _read_config(folder) if folder.is_dir() else {}
    try:
        return _load(folder, mode, trust_remote_code, config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of values in it
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {error!r}") from error


def _load(folder: Path, mode: str, trust_remote_code: bool, config: Mapping[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    if mode == "auto" and file.is_file():
        backend: Backend = _complete(_read_backend(file), config)
    elif (problem := folder / TOKENIZER_PROBLEM).is_file():
        raise CheckpointError(str(json.loads(problem.read_bytes())))
    elif mode == "auto" and (file := folder / "tekken.json").is_file():
        files = load("radixlm.text.tekken:tekken_files")(_read_json(file), str(file))
        config = {**files["tokenizer_config.json"], **config}
        backend = _complete(
            tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"])), config
        )
    else:
        backend, named = _load_with_transformers(folder, mode, trust_remote_code)
        config = {**config, **named}
    return Tokenizer(
        backend,
        _decoder_of(backend),
        _special_tokens(config),
        read_chat_templates(folder, config),
    )


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja, additional_chat_templates/, config, .json."""
    templates = _templates_of(config.get("chat_template"))
    file = folder / "chat_template.json"
    if not templates and file.is_file():
        templates = _templates_of(_read_json(file).get("chat_template"))
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _read_text(path)
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_text(file)
    return templates


def _templates_of(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value}
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json."""
    files = (folder / "special_tokens_map.json", folder / "tokenizer_config.json")
    return {key: v for file in files if file.is_file() for key, v in _read_json(file).items()}


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise CheckpointError(f"cannot read {file}: {error}") from error
    state = backend.normalizer.__getstate__() if backend.normalizer is not None else b"{}"
    if (factor := growth(json.loads(state))) > MAX_GROWTH:
        raise CheckpointError(
            f"{file}: its normalizer may make a text {factor:.0f} times longer; the limit is "
            f"{MAX_GROWTH}"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> Backend:
    """Add tokens of tokenizer_config.json that tokenizer.json lacks.

    Only tokenizer.json decides about BOS and EOS: Hugging Face ignores add_bos_token and
    add_eos_token where that file exists.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda e: int(e[0]))
    named = set(_special_texts(config, _NAMED))
    missing = [
        _added_token(entry, entry["content"] in named)
        for _, entry in entries
        if isinstance(entry, Mapping) and entry["content"] not in added
    ]
    backend.add_tokens(missing)
    added.update(token.content for token in missing)
    special = [
        AddedToken(text, special=True, normalized=False)
        for text in _special_texts(config, (*_NAMED, *_LISTED))
        if text not in added and backend.token_to_id(text) is not None
    ]  # a named token without an id would get one beyond the embedding table: skipped
    backend.add_special_tokens(special)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return backend


def _added_token(entry: Mapping[str, Any], is_named: bool) -> AddedToken:
    flags = {k: bool(entry[k]) for k in _FLAGS if k in entry}
    flags["special"] = flags.get("special", False) or is_named
    return AddedToken(entry["content"], **flags)


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return str(value) if isinstance(value, str | AddedToken) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: _content(config.get(name)) for name in _NAMED}
    tokens: dict[str, Any] = {name: text for name, text in named.items() if text is not None}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):  # named tokens of a multimodal model: "image_token", ...
        tokens.update({k: text for k, v in extra.items() if (text := _content(v)) is not None})
    listed = config.get("additional_special_tokens")
    if isinstance(listed, list) and listed:
        tokens["additional_special_tokens"] = [t for t in map(_content, listed) if t is not None]
    return tokens


def _special_texts(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    values: list[Any] = []
    for name in names:
        value = config.get(name)
        if name in _LISTED and value:
            values += value.values() if isinstance(value, Mapping) else value
        else:
            values.append(value)
    return list(dict.fromkeys(text for text in map(_content, values) if text))


def _decoder_of(backend: Backend) -> Decoder:
    if isinstance(backend, PythonBackend):
        return Decoder(is_generic=True)
    assert isinstance(backend, tokenizers.Tokenizer)
    decoder = backend.decoder
    return Decoder.from_json(decoder.__getstate__() if decoder is not None else None)


_MIN_VOCAB = 64  # of a tokenizer without files, such as one of bytes
_WORKS = "copy the model's there, or use --tokenizer-path or --skip-tokenizer-init"


def _load_with_transformers(
    path: Path, mode: str, trust_remote_code: bool
) -> tuple[Backend, dict[str, Any]]:
    """A backend and the named special tokens of a checkpoint without tokenizer.json."""
    if not path.exists():
        raise CheckpointError(f"no tokenizer at {path}: the path does not exist; {_WORKS}")
    library = require_transformers("hf", f"a tokenizer without tokenizer.json ({path})")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "use_fast": mode != "slow"}
    source = path if path.is_dir() else path.parent
    if not path.is_dir():
        options["gguf_file"] = path.name
    lacks_files = path.is_dir() and not has_tokenizer(one.name for one in path.iterdir())
    none = f"no tokenizer is in {path} (tokenizer.json); {_WORKS}"
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(source), **options)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        if lacks_files:
            raise CheckpointError(none) from error
        message = f"transformers cannot load a tokenizer from {path}: {error}"
        raise CheckpointError(message) from error
    if lacks_files and len(tokenizer) < _MIN_VOCAB:  # made of config.json alone
        raise CheckpointError(none)
    named = {name: getattr(tokenizer, name) for name in _NAMED}
    if isinstance(tokenizer.chat_template, str | dict):
        named["chat_template"] = tokenizer.chat_template
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return PythonBackend(tokenizer), named
    backend.no_truncation()
    backend.no_padding()
    return backend, named


class _Encoding:
    """Token ids with the interface of the library's Encoding."""

    __slots__ = ("ids", "type_ids")

    def __init__(self, ids: list[int], type_ids: list[int]) -> None:
        self.ids, self.type_ids = ids, type_ids


class PythonBackend:
    """A transformers tokenizer written in Python (remote code, sentencepiece) as a Backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_batch_fast(
        self, input: list[Any], *, add_special_tokens: bool = True
    ) -> list[_Encoding]:
        encodings = []
        for item in input:
            texts = item if isinstance(item, tuple) else (item,)
            ids = self._tokenizer.encode(*texts, add_special_tokens=add_special_tokens)
            types = self._tokenizer(*texts).get("token_type_ids") if len(texts) > 1 else None
            encodings.append(_Encoding(ids, types or []))
        return encodings

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decode(ids, skip_special_tokens, spaces=True)

    def decode_unspaced(self, ids: Sequence[int]) -> str:
        """All tokens, without spaces between the special ones."""
        return self._decode(ids, skip_special_tokens=False, spaces=False)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces: bool) -> str:
        known = [i for i in ids if i < len(self._tokenizer)]
        text = self._tokenizer.decode(
            known,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def id_to_token(self, id: int) -> str | None:
        """See Backend. Byte tokenizers (tiktoken) return tokens as bytes."""
        if id >= len(self._tokenizer):
            return None
        token = self._tokenizer.convert_ids_to_tokens(id)
        return token.decode("utf-8", "replace") if isinstance(token, bytes) else token

    def token_to_id(self, token: str) -> int | None:
        found = self._tokenizer.get_vocab().get(token)
        return None if found is None else int(found)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self._tokenizer) if with_added_tokens else int(self._tokenizer.vocab_size)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        special = set(self._tokenizer.all_special_ids)
        added = self._tokenizer.added_tokens_decoder
        return {
            int(i): AddedToken(str(token), special=token.special or i in special)
            for i, token in added.items()
        }

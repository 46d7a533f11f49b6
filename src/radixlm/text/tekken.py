"""Mistral's tokenizer file (tekken.json) as tokenizer.json and tokenizer_config.json: byte-level
BPE whose merges follow from the ranks of its tokens. Special tokens have the first ids."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from radixlm.base.errors import CheckpointError
from radixlm.text.token_bytes import BYTE_OF_CHAR
from radixlm.text.tokenizer_json import added, bpe, byte_level, merges_of, with_ends

# of files that list none
_OLD_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def tekken_files(raw: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """File name -> contents. CheckpointError names what is missing."""
    try:
        config = raw["config"]
        special = _special_tokens(raw, config)
        count = config.get("default_vocab_size", len(special) + len(raw["vocab"])) - len(special)
        stored = sorted(raw["vocab"], key=lambda one: int(one["rank"]))[:count]
        pieces = [_text_of(base64.b64decode(one["token_bytes"])) for one in stored]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source}: is no tokenizer of Mistral ({error!r})") from error
    merges = merges_of(pieces, [-float(rank) for rank in range(len(pieces))])
    model = byte_level([pattern])
    if "<s>" in special:
        after = model["post_processor"]
        model["post_processor"] = with_ends("<s>", None, {"<s>": special.index("<s>")}, after)
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added(i, text, True) for i, text in enumerate(special)],
            "normalizer": None,
            **model,
            "model": bpe([*special, *pieces], merges, ignore_merges=True),
        },
        "tokenizer_config.json": {
            "clean_up_tokenization_spaces": False,
            **{name: text for name, text in _NAMED.items() if text in special},
        },
    }


def _special_tokens(raw: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The special tokens by id, with names for ids that have none."""
    listed = raw.get("special_tokens")
    if listed is None:
        texts = dict(enumerate(_OLD_SPECIAL))
    else:
        texts = {int(one["rank"]): str(one["token_str"]) for one in listed}
    count = config.get("default_num_special_tokens") or len(texts)
    return [texts.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _text_of(piece: bytes) -> str:
    return "".join(_CHAR_OF_BYTE[byte] for byte in piece)

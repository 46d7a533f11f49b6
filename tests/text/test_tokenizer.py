"""The tokenizer equals Hugging Face's for every kind of file, and bad input is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.fakes import toy_tokenizer

from radixlm.base.errors import CheckpointError, ConfigError, InvalidRequest
from radixlm.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [*toy_tokenizer.CORPUS, "", " ", "  two  spaces ", "<s>hi</s><|im_end|>", "<tool_call>é!\n"]


def make(tmp_path: Path, kind: str, **config: Any) -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    folder = toy_tokenizer.save(toy_tokenizer.build(kind), tmp_path / kind, **config)
    return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", toy_tokenizer.KINDS)
def test_encode_and_decode_equal_hugging_face(tmp_path: Path, kind: str) -> None:
    ours, theirs = make(tmp_path, kind)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    rng = random.Random(1)
    for _ in range(50):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(12))]
        ids = [i for i in ids if ours.id_to_piece(i) != "é!"]  # Hugging Face's breaks this one
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), ids
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | ours.special_ids
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_bos_and_eos_are_as_tokenizer_json_has_them(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    ours, theirs = make(tmp_path, "byte_level", add_bos_token=True)
    assert ours.encode("hello") == theirs.encode("hello")
    file = str(tmp_path / "byte_level" / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(file)
    ours = load_tokenizer(tmp_path / "byte_level")
    theirs = type(theirs).from_pretrained(tmp_path / "byte_level")
    assert ours.encode("hello") == theirs.encode("hello", padding=False, truncation=False)
    assert ours.encode("hello")[0] == ours.bos_id
    assert ours.encode("hello")[-1] == ours.eos_id
    assert ours.encode("hello", add_special_tokens=False) == ours.encode("hello")[1:-1]


def test_the_config_adds_tokens_and_marks_them_special(tmp_path: Path) -> None:
    extra = {str(602 + i): {"content": f"<x{i}>", "special": i == 0} for i in range(3)}
    ours, theirs = make(
        tmp_path,
        "byte_level",
        added_tokens_decoder=extra,
        eos_token="<x1>",
        additional_special_tokens=["Ġthe"],
    )
    assert ours.eos_id == ours.token_id("<x1>") == theirs.eos_token_id
    text = "a<x0>b<x1>c<x2>d the"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), True)
    assert ours.decode(ours.encode(text)) == "abc<x2>d"
    assert ours.is_special(ours.token_id("Ġthe") or -1)


def test_a_named_token_without_an_id_is_ignored(tmp_path: Path) -> None:
    tokenizer, _ = make(tmp_path, "byte_level", pad_token="<no such token>")
    assert "pad_token" in tokenizer.special_tokens
    assert max(tokenizer.encode("<no such token>")) < tokenizer.vocab_size - 1


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_token_bytes_join_to_the_text(tmp_path: Path, kind: str) -> None:
    tokenizer, _ = make(tmp_path, kind)
    for text in toy_tokenizer.CORPUS[:4]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.token_id("<unk>") in ids:
            continue
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert joined.removeprefix(" ") == text


def test_bytes_of_single_tokens(tmp_path: Path) -> None:
    tokenizer, _ = make(tmp_path, "byte_fallback")
    for piece, data in [("▁Hello", b" Hello"), ("<0xE4>", b"\xe4"), ("<s>", b"<s>")]:
        token = tokenizer.token_id(piece)
        assert token is not None
        assert tokenizer.token_bytes(token) == data
    assert tokenizer.token_text(tokenizer.token_id("<0xE4>") or 0) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(10**12) == b""
    level, _ = make(tmp_path, "byte_level")
    assert level.token_bytes(level.token_id("é!") or 0).decode() == "é!"
    piece, _ = make(tmp_path, "wordpiece")
    assert [piece.token_bytes(piece.token_id(p) or 0) for p in ("##ld", "wor")] == [b"ld", b" wor"]


def test_odd_input(tmp_path: Path) -> None:
    tokenizer, _ = make(tmp_path, "byte_level")
    assert tokenizer.encode("a\ud83d\ude00\ud800b") == tokenizer.encode("a😀\ufffdb")
    assert tokenizer.decode([10**6, *tokenizer.encode("a")]) == "a"
    for bad in (None, 5, b"a", ["a"]):
        with pytest.raises(InvalidRequest):
            tokenizer.encode(bad)  # type: ignore[arg-type]
    for ids in ([-1], [True], ["a"], [1.5], [1 << 40]):
        with pytest.raises(InvalidRequest):
            tokenizer.decode(ids)  # type: ignore[arg-type]


def test_chat_templates_are_found_in_every_file(tmp_path: Path) -> None:
    tokenizer, _ = make(tmp_path, "words", chat_template="one")
    assert tokenizer.chat_template() == "one"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    tokenizer, _ = make(tmp_path, "words", chat_template=named)
    assert [tokenizer.chat_template(has_tools=tools) for tools in (False, True)] == ["one", "two"]
    assert tokenizer.chat_template("tool_use") == "two"
    folder = tmp_path / "words"
    (folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(folder).chat_template() == "three"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).chat_template() is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "four"}))
    assert load_tokenizer(folder).chat_template() == "four"


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = toy_tokenizer.save(toy_tokenizer.words(), tmp_path / "words")
    with pytest.raises(ConfigError, match="tokenizer-mode"):
        load_tokenizer(folder, mode="fast")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        {"added_tokens_decoder": {"9": {}}},
        {"additional_special_tokens": 3},
        {"bos_token": "\ud800"},
        {"chat_template": [{"name": "default"}]},
    ],
    ids=str,
)
def test_values_of_wrong_types_are_errors_of_the_checkpoint(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folder = toy_tokenizer.save(toy_tokenizer.build("words"), tmp_path, **values)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    model = toy_tokenizer.byte_level().model
    model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello wörld")) == "Hello wörld"
    assert tokenizer.eos_id == tokenizer.token_id("</s>")


def test_the_slow_mode_gives_the_same_ids(tmp_path: Path) -> None:
    fast, _ = make(tmp_path, "words")
    slow = load_tokenizer(tmp_path / "words", "slow")
    for text in ("one two", "  three\n", ""):
        assert list(slow.encode(text)) == list(fast.encode(text))

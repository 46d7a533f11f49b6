"""How a grammar backend holds the JSON-Schema-Test-Suite: ``python bench/json_schema.py FOLDER``.

FOLDER is the suite's tests/draft2020-12; the files of its top level are read, or those that are
named after it. A document is matched if the grammar accepts it byte by byte, as json.dumps writes
it. One line a mode, then with -v the groups with matched invalid documents.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from radixlm.base.errors import InvalidRequest
from radixlm.grammar.compile import create_backend
from radixlm.grammar.spec import CompiledGrammar, GrammarBackend, GrammarSpec

VOCAB, EOS = 300, 299


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size, special_ids, bos_id = VOCAB, frozenset((EOS,)), None

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token

    def id_to_piece(self, token: int) -> str:
        return f"<{token}>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def is_matched(grammar: CompiledGrammar, document: Any) -> bool:
    """Whether the grammar accepts the document and its end."""
    matcher = grammar.matcher()
    try:
        text = json.dumps(document, ensure_ascii=False).encode()
        return all(matcher.accept(byte) for byte in text) and matcher.accept(EOS)
    except InvalidRequest:  # a limit of the matcher
        return False


def count(backend: GrammarBackend, groups: list[Any], is_strict: bool, verbose: bool) -> None:
    """Print the figures of one mode."""
    accepted, invalid, wrong, valid, missed = 0, 0, 0, 0, 0
    for group in groups:
        spec = GrammarSpec("json_schema", json.dumps(group["schema"]), is_strict)
        try:
            grammar = backend.compile(spec)
        except InvalidRequest:
            continue
        accepted += 1
        found = [(test, is_matched(grammar, test["data"])) for test in group["tests"]]
        invalid += sum(not test["valid"] for test, _ in found)
        valid += sum(test["valid"] for test, _ in found)
        bad = [test for test, matched in found if matched and not test["valid"]]
        wrong += len(bad)
        lost = [test for test, matched in found if not matched and test["valid"]]
        missed += len(lost)
        for tests, what in ((bad, "invalid and matched"), (lost, "valid and not matched")):
            for test in tests if verbose else ():
                print(f"  {group['file']}: {group['description']}: {test['data']!r:.60} {what}")
    print(
        f"{'with' if is_strict else 'without'} strict: accepted {accepted}, "
        f"refused {len(groups) - accepted}, invalid documents matched {wrong} of {invalid}, "
        f"valid documents not matched {missed} of {valid}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="names such as contains.json")
    parser.add_argument("--grammar-backend", default="llguidance")
    parser.add_argument("-v", action="store_true", help="name the groups")
    args = parser.parse_args()
    paths = [args.folder / name for name in args.files] or sorted(args.folder.glob("*.json"))
    groups = [
        group | {"file": path.name} for path in paths for group in json.loads(path.read_text())
    ]
    backend = create_backend(args.grammar_backend, Bytes(), (EOS,), VOCAB)  # type: ignore[arg-type]
    assert backend is not None
    for is_strict in (True, False):
        count(backend, groups, is_strict, args.v)


if __name__ == "__main__":
    main()

"""SGLang's pickled logit processors: known by name, never run."""

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from radixlm.entrypoints.request_options import processor_name
from radixlm.entrypoints.sglang_processors import NAMES, known_processor

MODULE = "sglang.srt.sampling.custom_logit_processor"


def sent(pickled: bytes) -> str:
    return json.dumps({"callable": pickled.hex()})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", NAMES)
def test_a_class_by_name_is_ours(name: str, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(name, (), {"__module__": MODULE})
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, name, cls)
    text = sent(pickle.dumps(cls, protocol))
    assert known_processor(text) == processor_name(text) == NAMES[name]


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_other_pickles_are_no_processor_and_do_not_run(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    texts = [
        sent(pickle.dumps(Touch(path))),
        sent(pickle.dumps(json.JSONDecoder)),  # a class of another module
        sent(pickle.dumps([MODULE, "Qwen3ThinkingBudgetLogitProcessor"])),
        sent(b"\x80\x04no pickle"),
        '{"callable": "zz"}',
        '{"callable": 1}',
        "{",
        "[1]",
    ]
    assert [known_processor(text) for text in texts] == [None] * len(texts)
    assert not path.exists()

"""Only installed processors can be named."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from radixlm.base.errors import ConfigError, InvalidRequest
from radixlm.sampling.processors import LogitProcessors


def test_processors_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("toy_processors")

    class Toy:
        def __call__(self, logits: object, params: object) -> object:
            return logits

    module.Toy, module.value = Toy, 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_processors", module)
    processors = LogitProcessors(["toy=toy_processors:Toy"])
    assert isinstance(processors.get("toy"), Toy)
    assert processors
    assert not LogitProcessors()
    with pytest.raises(InvalidRequest, match="toy") as caught:
        processors.get("other")
    assert caught.value.param == "custom_logit_processor"
    for bad in ("toy", "a=b", "a=no_such:X", "a=toy_processors:No", "a=toy_processors:value"):
        with pytest.raises(ConfigError, match="--custom-logit-processor"):
            LogitProcessors([bad])

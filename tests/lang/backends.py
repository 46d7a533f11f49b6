"""Backends without a model, for tests of programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.choices import ChoicesDecision

LIMIT_S = 20.0  # of any wait in a test


class Echo(BaseBackend):
    """Answers "[number of characters of the text]", at once in the caller's thread."""

    is_immediate = True

    def __init__(self, template: Any = None) -> None:
        super().__init__()
        self.chat_template = template or self.chat_template
        self.calls: list[tuple[str, Any]] = []

    def get_model_name(self) -> str:
        return "echo"

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        self.calls.append((s.text_, sampling_params))
        text = f"[{len(s.text_)}]"
        if (sampling_params.n or 1) > 1:
            return [f"{text}{i}" for i in range(sampling_params.n)], [{}] * sampling_params.n
        return text, {"prompt_tokens": len(s.text_)}

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[tuple[str, Any]]:
        text, meta = self.generate(s, sampling_params)
        for piece in text:
            yield piece, meta

    def select(
        self, s: Any, choices: Any, temperature: float, choices_method: Any = None
    ) -> ChoicesDecision:
        self.calls.append((s.text_, choices))
        return ChoicesDecision(choices[len(s.text_) % len(choices)], {"of": len(choices)})


class Waiting(Echo):
    """The same in threads, each call when ``go`` is set."""

    is_immediate = False

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        assert self.go.wait(LIMIT_S)
        return super().generate(s, sampling_params)


class Failing(Echo):
    """Fails from the n-th call on."""

    def __init__(self, after: int = 0, is_immediate: bool = True) -> None:
        super().__init__()
        self._left, self.is_immediate = after, is_immediate

    def generate(self, s: Any, sampling_params: Any) -> tuple[str | list[str], Any]:
        self._left -= 1
        if self._left < 0:
            raise ConnectionError("the server is gone")
        return super().generate(s, sampling_params)


def in_time(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in a thread; fails if it does not end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it waits without end"
    value, error = found[0]
    if error is not None:
        raise error
    return value

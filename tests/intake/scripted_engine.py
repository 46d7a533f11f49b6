"""A scripted engine in the event loop of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixlm.engine.intake import ServerIntake
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.observer import Observer
from radixlm.intake.records import GenerateRequest
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.codec import intake_codec, scheduler_codec
from radixlm.wire.replies import Finish, Heartbeat, LoadReport, StepReply, TokenDelta
from radixlm.wire.requests import AbortRequest, Control, TokenizedRequest
from radixlm.wire.sampling_params import SamplingParams


class ScriptedLink:
    """A link whose two directions go through the real codec, as between processes."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._handler: Callable[[Any], None] | None = None
        self._there, self._back = scheduler_codec(), intake_codec()

    def start(self, handler: Callable[[Any], None]) -> None:
        self._handler = handler

    def send(self, message: Any) -> None:
        self.sent.append(self._there.decode(self._there.encode(message)))

    def close(self) -> None:
        """Nothing to free."""

    def say(self, message: Any) -> None:
        assert self._handler is not None
        self._handler(self._back.decode(self._back.encode(message)))

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]

    @property
    def requests(self) -> list[TokenizedRequest]:
        return self.of(TokenizedRequest)

    @property
    def aborts(self) -> list[AbortRequest]:
        return self.of(AbortRequest)

    @property
    def controls(self) -> list[Control]:
        return self.of(Control)


class Watch(Observer):
    """Records the calls of an observer."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.tokens = 0

    def submitted(self, state: Any) -> None:
        self.begun.append(state.rid)

    def progressed(self, state: Any, num_tokens: int) -> None:
        self.tokens += num_tokens

    def ended(self, state: Any, finish: Finish) -> None:
        self.done.append((state.rid, finish.kind))


class IntakeHarness:
    """An intake and its scripted engine."""

    def __init__(
        self, tokenizer: Tokenizer | None, is_ready: bool = True, vocab: int = 0, **facts: Any
    ) -> None:
        self.tokenizer, self.link, self.watch = tokenizer, ScriptedLink(), Watch()
        vocab = vocab or (tokenizer.vocab_size if tokenizer else 1000)
        facts.setdefault("context_len", 64)
        self.intake = ServerIntake(
            tokenizer, IntakeFacts(vocab=vocab, **facts), self.link, (self.watch,)
        )
        self.intake.start()
        if is_ready:
            self.ready()

    def ready(self) -> None:
        self.intake.become_ready({"max_total_num_tokens": 4096, "context_len": 64})

    def ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, False)

    def ask(self, rid: str = "r", text: str | None = None, **fields: Any) -> GenerateRequest:
        """A request with the prompt [5, 6, 7], or with `text`; other fields go to the sampling
        parameters."""
        mine = {k: fields.pop(k) for k in list(fields) if k in GenerateRequest.__slots__}
        ids = None if text is not None or "embeds" in mine else mine.pop("input_ids", [5, 6, 7])
        sampling = SamplingParams(**{"max_new_tokens": 16, **fields})
        return GenerateRequest(sampling, text=text, input_ids=ids, rid=rid, stream=True, **mine)

    def reply(self, rid: str, tokens: list[int], finish: Finish | None = None, **more: Any) -> None:
        delta = TokenDelta(rid=rid, tokens=tokens, finish=finish, prompt_tokens=3, **more)
        self.link.say(StepReply([delta]))

    def beat(self) -> None:
        self.link.say(Heartbeat(LoadReport()))

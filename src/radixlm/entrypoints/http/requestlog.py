"""The observer behind --log-requests."""

from __future__ import annotations

from radixlm.intake.request_state import RequestState
from radixlm.intake.tokenizer_manager import Observer
from radixlm.observe.requestlog import finished, received
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish

TEXT_LEVEL = 2


class RequestLog(Observer):
    """Logs requests as they come and end while ``is_on``; ``level`` says how much of them."""

    def __init__(self, tokenizer: Tokenizer | None, is_on: bool, level: int) -> None:
        self._tokenizer, self.is_on, self.level = tokenizer, is_on, level

    def submitted(self, state: RequestState) -> None:
        if self.is_on:
            text = self._text(state.wire.ids().tolist())
            received(state.rid, self.level, state.prompt_tokens, state.wire.sampling, text)

    def ended(self, state: RequestState, finish: Finish) -> None:
        if not self.is_on:
            return
        end = state.pending
        facts = {
            "reason": finish.kind if finish.message is None else f"{finish.kind}: {finish.message}",
            "prompt": state.prompt_tokens,
            "cached": end.cached_tokens if end else 0,
            "output": len(state.output_ids),
            "first token": f"{max(state.first_token_s - state.arrival_s, 0):.3f} s",
            "total": f"{state.finished_s - state.arrival_s:.3f} s",
        }
        finished(state.rid, self.level, facts, self._text(state.output_ids))

    def _text(self, ids: list[int]) -> str | None:
        """Only where it is shown: decoding a long prompt costs."""
        if self._tokenizer is None or self.level < TEXT_LEVEL:
            return None
        return self._tokenizer.decode(ids, skip_special_tokens=False)

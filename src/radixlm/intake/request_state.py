"""RequestState: one unfinished sequence at intake: all that is needed to send it again to another
engine, and its way from tokens to text.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from radixlm.intake.records import Output
from radixlm.text.detokenize import Detokenizer
from radixlm.text.prediction import Prediction
from radixlm.text.stop import StopChecker
from radixlm.wire.replies import Finish, TokenDelta
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams


class Rows(Protocol):
    """What a request gets of each token besides text."""

    def take(self, delta: TokenDelta) -> tuple[list[bytes] | None, list[bytes] | None]:
        """Hidden states and experts of tokens that have had none."""

    def begin_again(self) -> None:
        """A new engine starts at the first token."""


class RequestState:
    """A sequence from submission to its end. It outlives engine processes."""

    __slots__ = (
        "abort_message",
        "arrival_s",
        "before",
        "began_s",
        "crash_count",
        "detokenizer",
        "ended",
        "event",
        "finished_s",
        "first_token_s",
        "index",
        "is_quarantined",
        "last_delta",
        "last_token_s",
        "name",
        "news",
        "output_ids",
        "pending",
        "prediction",
        "prompt_tokens",
        "replica",
        "rows",
        "stop",
        "unread_s",
        "weight_version",
        "wire",
    )

    def __init__(
        self,
        wire: TokenizedRequest,
        index: int,
        detokenizer: Detokenizer | None,
        stop: StopChecker | None,
        event: asyncio.Event | None = None,
    ) -> None:
        """``event`` is set when there is something new; parallel samples share one."""
        self.wire, self.index = wire, index
        self.name = wire.rid  # that clients see
        self.replica: int | None = None  # who was asked for
        self.detokenizer, self.stop = detokenizer, stop
        self.output_ids: list[int] = []
        self.last_delta = TokenDelta(wire.rid)  # the last one that the engine sent whole
        self.before: TokenDelta | None = None  # the last of an engine that is gone
        self.news: list[int | TokenDelta] | None = None  # since the last read, if recorded
        self.pending: Output | None = None
        self.event = event or asyncio.Event()
        self.unread_s = 0.0  # how long there has been something to read
        self.abort_message: str | None = None  # an operator wants it ended
        self.ended = False
        self.crash_count = 0
        self.is_quarantined = False
        self.arrival_s = time.monotonic()
        self.began_s = 0.0  # when its prompt began to be tokenized
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.finished_s = 0.0
        self.prompt_tokens = len(wire.input_ids) // 4
        ids = np.frombuffer(wire.prediction, "<i4")
        self.prediction = Prediction(ids) if len(ids) else None
        self.rows: Rows | None = None
        self.weight_version = ""  # of what computed the last token

    @property
    def rid(self) -> str:
        return self.wire.rid

    def resume_request(self) -> TokenizedRequest:
        """The same request with what was emitted appended to its prompt: a new engine goes on
        where the old one stopped, random draws being keyed by (seed, position)."""
        if self.rows is not None:
            self.rows.begin_again()
        ids = self.wire.input_ids
        if self.output_ids:
            self.before = self.last_delta if self.last_delta.prompt_tokens else None
            ids += pack_ids(np.asarray(self.output_ids))
        return msgspec.structs.replace(
            self.wire,
            input_ids=ids,
            num_emitted=len(self.output_ids),
            is_quarantined=self.is_quarantined,
            # it has been through the queue once
            queue_deadline_s=0.0 if self.output_ids else self.wire.queue_deadline_s,
        )

    def single_token_delta(self, token: int) -> TokenDelta:
        """The delta of a step reply that carries only a token for this request."""
        last = self.last_delta
        return TokenDelta(
            last.rid,
            [token],
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            retractions=last.retractions,
            queue_time_s=last.queue_time_s,
            draft_rounds=last.draft_rounds,
            num_drafted=last.num_drafted,
            cached_by_tier=last.cached_by_tier,
        )

    def replay(self, news: Sequence[int | TokenDelta]) -> Output | None:
        """What another server made of ``news``, which its engine sent."""
        for one in news:
            if isinstance(one, TokenDelta):
                self.name = one.rid
            self.apply_delta(one)
        return self.read()

    def _continued(self, delta: TokenDelta) -> TokenDelta:
        """``delta`` of a new engine, with what only the first one can tell of the prompt."""
        before = self.before
        if before is None:
            return delta
        return msgspec.structs.replace(
            delta,
            cached_tokens=before.cached_tokens,
            cached_by_tier=before.cached_by_tier,
            queue_time_s=before.queue_time_s,
            retractions=max(before.retractions, delta.retractions),
        )

    def apply_delta(self, news: int | TokenDelta) -> str | None:
        """Append what the scheduler sent: a delta, or one token. The stop string that ended the
        text, if one did: the scheduler must abort the request then."""
        now_s = time.monotonic()
        if isinstance(news, int):
            delta = self.single_token_delta(news)
        else:
            news = delta = self._continued(news)
        if self.news is not None:
            self.news.append(news)
        self.last_delta = delta
        if delta.tokens:
            self.first_token_s = self.first_token_s or now_s
            self.last_token_s = now_s
            self.crash_count = 0  # it can be computed, so it did not cause the crashes
        text, matched, num_kept = self._text(delta)
        if num_kept < len(delta.tokens):
            delta = _cut(delta, num_kept)
        self.output_ids.extend(delta.tokens)
        predicted = self._predicted(delta) if self.prediction is not None else None
        hidden, routed = self.rows.take(delta) if self.rows is not None else (None, None)
        finish = Finish("stop", matched=matched) if matched is not None else delta.finish
        self._put(
            Output(
                index=self.index,
                rid=self.name,
                text=text,
                token_ids=list(delta.tokens),
                finish=finish,
                prompt_tokens=delta.prompt_tokens,
                completion_tokens=len(self.output_ids),
                cached_tokens=delta.cached_tokens,
                cached_by_tier=delta.cached_by_tier,
                predicted=predicted,
                retractions=delta.retractions,
                logprobs=delta.logprobs,
                prompt_logprobs=delta.prompt_logprobs,
                hidden_states=hidden,
                routed_experts=routed,
                pooled=delta.pooled,
                queue_time_s=delta.queue_time_s,
                draft_rounds=delta.draft_rounds,
                num_drafted=delta.num_drafted,
                prefill_s=max(0.0, self.first_token_s - self.arrival_s),
            )
        )
        return matched if delta.finish is None else None

    def _predicted(self, delta: TokenDelta) -> tuple[int, int]:
        """Tokens of the prediction that the output holds, and those that it does not."""
        assert self.prediction is not None
        self.prediction.follow(delta.tokens)
        num_accepted = self.prediction.num_accepted
        return num_accepted, len(self.prediction.ids) - num_accepted

    def _text(self, delta: TokenDelta) -> tuple[str, str | None, int]:
        """New text, the stop that ended it, and how many of the tokens there are up to it."""
        count = len(delta.tokens)
        if self.detokenizer is None:
            return "", None, count
        ids, finish = delta.tokens, delta.finish
        is_stopped = finish is not None and finish.kind == "stop" and finish.matched is not None
        if is_stopped and not self.wire.sampling.no_stop_trim:
            ids = ids[:-1]  # the token that ended the text is not part of it
        if self.stop is None:
            text = self.detokenizer.feed(ids)
            return text + (self.detokenizer.finish() if finish is not None else ""), None, count
        text, matched = "", None
        for place, token in enumerate(ids, 1):
            part, matched = self.stop.feed(self.detokenizer.feed([token]))
            text += part
            if matched is not None:  # several tokens came at once: the rest is beyond the end
                return text, matched, place
        if finish is not None:
            part, matched = self.stop.feed(self.detokenizer.finish())
            if matched is None:
                rest, matched = self.stop.finish()
                part += rest
            text += part
        return text, matched, count

    def fail(self, finish: Finish) -> None:
        """End without the scheduler."""
        if not self.ended:
            self._put(
                Output(
                    index=self.index,
                    rid=self.name,
                    finish=finish,
                    prompt_tokens=self.prompt_tokens,
                    completion_tokens=len(self.output_ids),
                )
            )

    def _put(self, output: Output) -> None:
        if output.finish is not None:
            self.ended = True
            self.finished_s = time.monotonic()
        output.adapter = self.wire.adapter
        output.weight_version = self.weight_version
        if self.pending is None:
            self.pending = output
        else:
            self.pending.absorb(output)
        self.event.set()

    async def next(self) -> Output:
        """What is new; waits until there is something."""
        while (output := self.read()) is None:
            self.event.clear()
            await self.event.wait()
        return output

    def read(self) -> Output | None:
        """What is new, None if nothing is."""
        output, self.pending = self.pending, None
        self.unread_s = 0.0
        return output


def _cut(delta: TokenDelta, count: int) -> TokenDelta:
    """The delta with its first ``count`` tokens only, and what belongs to them."""
    found, hidden = delta.logprobs, delta.hidden_states
    if found is not None:
        found = found.first(count)
    if hidden is not None:  # every token but the first has a part of its own
        hidden = hidden[: len(hidden) - (len(delta.tokens) - count)]
    return msgspec.structs.replace(
        delta, tokens=delta.tokens[:count], logprobs=found, hidden_states=hidden
    )


async def merge_outputs(states: list[RequestState]) -> AsyncIterator[Output]:
    """Outputs of several samples as they come, until all have ended. What a slow reader leaves
    waits in the samples themselves, joined to one output each."""
    left = list(states)
    while left:
        left[0].event.clear()  # parallel samples share it
        for state in tuple(left):
            output = state.read()
            if output is None:
                continue
            if output.finish is not None:
                left.remove(state)
            yield output
        if left and not left[0].event.is_set():
            await left[0].event.wait()


def stop_checker(sampling: SamplingParams) -> StopChecker | None:
    """What looks for the request's stops, None if it has none."""
    if not sampling.stop and not sampling.stop_regex:
        return None
    return StopChecker(sampling.stop, sampling.stop_regex, trim=not sampling.no_stop_trim)

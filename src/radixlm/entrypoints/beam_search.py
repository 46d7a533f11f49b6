"""Beam search: the sequences that the model finds likeliest, found over intake.

Each step is one request a beam, of one token and the likeliest ones in its place; what the beams
have in common is in the prefix cache. The search is that of SGLang's ``beam_width`` and of vLLM's
``use_beam_search``: 2 k candidates a step, of which k go on and those with a stop token are done;
the best have the largest sum of log-probabilities / length ** length_penalty.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from radixlm.base.errors import InvalidRequest
from radixlm.continuation.stream_journal import begin_journal
from radixlm.intake.records import GenerateRequest, Output, in_client_words
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.text.detokenize import Detokenizer
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish
from radixlm.wire.requests import LogprobParams
from radixlm.wire.sampling_params import SamplingParams

_LATE = Finish("abort", message="request timed out", status=408)


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence. ``logprob``: the sum of its tokens' log-probabilities."""

    ids: tuple[int, ...] = ()
    logprob: float = 0.0
    finish: Finish | None = None

    def score(self, penalty: float) -> float:
        """By which sequences are ranked."""
        return self.logprob / float(len(self.ids) ** penalty)


async def collect(intake: TokenizerManager, request: GenerateRequest) -> list[Output]:
    """``intake.collect``, or the sequences of a beam search, best first."""
    if not request.sampling.beam_width:
        return await intake.collect(request)
    return await _Search(intake, request).run()


async def stream(intake: TokenizerManager, request: GenerateRequest) -> AsyncIterator[Output]:
    """``intake.stream``; the sequences of a beam search come whole, at its end."""
    if request.sampling.beam_width:
        for output in await _Search(intake, request).run():
            yield output
        return
    async for output in intake.stream(request):
        yield output


class _Search:
    """One search; InvalidRequest names what it does not go with."""

    def __init__(self, intake: TokenizerManager, request: GenerateRequest) -> None:
        self._intake, self._request = intake, request
        try:
            request.sampling.validate(intake.facts.vocab)
            _check(request, intake.tokenizer)
        except InvalidRequest as error:
            raise in_client_words(error, request.names) from None
        sampling = request.sampling
        self._width, self._penalty = sampling.beam_width or 1, sampling.length_penalty
        self._least = sampling.min_new_tokens
        eos = () if sampling.ignore_eos else intake.facts.eos_ids
        self._stop_ids = frozenset((*sampling.stop_token_ids, *eos))
        self._rid = request.rid or secrets.token_hex(16)
        timeout_s = request.timeout_s or intake.facts.request_timeout_s or math.inf
        self._ends_s = time.monotonic() + timeout_s
        self._one = msgspec.structs.replace(
            SamplingParams(), max_new_tokens=1, temperature=0.0, ignore_eos=True,
            logit_bias=sampling.logit_bias, allowed_token_ids=sampling.allowed_token_ids,
        )  # fmt: skip
        self._prompt: list[int] = []
        self._first = Output()
        self._most, self._num_requests = 0, 0

    async def run(self) -> list[Output]:
        """The best sequences; one Output where a request was ended or failed."""
        live, done = [Beam()], list[Beam]()
        while live and not self._is_over(live[0], done):
            if time.monotonic() > self._ends_s:
                return [replace(self._first, rid=self._rid, finish=_LATE, token_ids=[])]
            outputs = await self._step(live)
            if failed := next((o for o in outputs if _has_failed(o)), None):
                return [replace(failed, rid=self._rid, text="", token_ids=[], logprobs=None)]
            if not live[0].ids:
                self._first = replace(outputs[0], text="", logprobs=None)
                self._most = self._room()
            live = self._advance(live, outputs, done)
        if not done:
            text = "min_new_tokens: only tokens that end the answer are allowed"
            raise InvalidRequest(text, "min_new_tokens")
        best = sorted(done, key=lambda beam: -beam.score(self._penalty))
        return [self._output(i, beam) for i, beam in enumerate(best[: self._request.sampling.n])]

    async def _step(self, live: Sequence[Beam]) -> list[Output]:
        """An Output of one token for each beam, with the likeliest ones."""
        requests = [self._request_of(beam) for beam in live]
        made = [asyncio.ensure_future(self._collect(one)) for one in requests]
        try:
            outputs = await asyncio.gather(*made)
        finally:
            for task in made:
                task.cancel()
        if not self._prompt:
            self._prompt = requests[0].input_ids or []
            if self._request.shows_prompt_ids:
                self._request.text, self._request.input_ids = None, self._prompt
        return [output for one in outputs for output in one]

    async def _collect(self, request: GenerateRequest) -> list[Output]:
        begin_journal(None, is_wanted=False)  # of this task: another server begins anew
        return await self._intake.collect(request)

    def _request_of(self, beam: Beam) -> GenerateRequest:
        self._num_requests += 1
        prompt = [*self._prompt, *beam.ids] if self._prompt else self._request.input_ids
        return replace(
            self._request,
            rid=f"{self._rid}#{self._num_requests}",  # by ``rid`` all of them are aborted
            sampling=self._one,
            text=None if self._prompt else self._request.text,
            input_ids=prompt,
            logprobs=LogprobParams(-1, min(2 * self._width, self._intake.facts.vocab)),
            stream=False,
            shows_prompt_ids=True,
            hint=None if self._prompt else self._request.hint,  # the prompt's pages come once
        )

    def _room(self) -> int:
        """Tokens of a sequence, at most."""
        room = self._intake.facts.context_len - len(self._prompt)
        asked = self._request.sampling.max_new_tokens
        return room if asked is None else min(asked, room)

    def _advance(
        self, live: Sequence[Beam], outputs: Sequence[Output], done: list[Beam]
    ) -> list[Beam]:
        """The beams that go on, at most ``width``; those that end are put to ``done``."""
        found = [
            (beam.logprob + logprob, token, beam)
            for beam, output in zip(live, outputs, strict=True)
            for logprob, token in (output.logprobs.top[0] if output.logprobs else None) or ()
        ]
        found.sort(key=lambda one: -one[0])
        kept: list[Beam] = []
        for logprob, token, beam in found[: 2 * self._width]:
            ids, is_stop = (*beam.ids, token), token in self._stop_ids
            if logprob == -math.inf or (is_stop and len(ids) <= self._least):
                continue
            finish = Finish("stop", matched=token) if is_stop else self._stop_text(ids)
            if finish is None and len(ids) >= self._most:
                finish = Finish("length")
            (done if finish else kept).append(Beam(ids, logprob, finish))
            if len(kept) == self._width:
                break
        return kept

    def _stop_text(self, ids: tuple[int, ...]) -> Finish | None:
        """Whether a stop string stands in the text."""
        stops = self._request.sampling.stop
        if not stops or len(ids) <= self._least:
            return None
        text = self._text(ids)
        at = {stop: text.find(stop) for stop in stops if stop in text}
        return Finish("stop", matched=min(at, key=lambda stop: at[stop])) if at else None

    def _is_over(self, best: Beam, done: Sequence[Beam]) -> bool:
        """Whether nothing that ``best`` may become is better than the sequences that are wanted."""
        count = self._request.sampling.n
        if len(done) < count:
            return False
        worst = sorted((beam.score(self._penalty) for beam in done), reverse=True)[count - 1]
        lengths = len(best.ids) + 1, self._most  # no log-probability is above 0
        return worst >= max(best.logprob / float(each**self._penalty) for each in lengths)

    def _text(self, ids: Sequence[int]) -> str:
        tokenizer, sampling = self._intake.tokenizer, self._request.sampling
        if tokenizer is None:
            return ""
        spaces = sampling.spaces_between_special_tokens
        made = Detokenizer(tokenizer, sampling.skip_special_tokens, spaces, self._prompt)
        return made.feed(ids) + made.finish()

    def _output(self, index: int, beam: Beam) -> Output:
        keeps_stop = self._request.sampling.no_stop_trim
        finish = beam.finish or Finish("length")
        is_token = isinstance(finish.matched, int)
        text = self._text(beam.ids[:-1] if is_token and not keeps_stop else beam.ids)
        if isinstance(finish.matched, str):
            end = text.find(finish.matched) + (len(finish.matched) if keeps_stop else 0)
            text = text[:end]
        return replace(
            self._first, index=index, rid=self._rid, text=text, token_ids=list(beam.ids),
            finish=finish, completion_tokens=len(beam.ids),
            score=beam.score(self._penalty),
        )  # fmt: skip


def _has_failed(output: Output) -> bool:
    return output.finish is None or output.finish.kind in ("abort", "error")


def _grammar_name(request: GenerateRequest) -> str:
    kind = request.grammar.kind if request.grammar else "regex"
    return kind if kind in ("json_schema", "regex", "ebnf", "structural_tag") else "tool_choice"


def _check(request: GenerateRequest, tokenizer: Tokenizer | None) -> None:
    """InvalidRequest for what a beam search does not go with."""
    sampling = request.sampling
    taken = {
        "session_params": request.session,
        "image_data": request.prompt,
        "input_embeds": request.embeds,
        "return_logprob": request.logprobs,
        "return_hidden_states": request.return_hidden_states,
        "return_routed_experts": request.return_routed_experts,
        "custom_logit_processor": request.processor,
        "streaming_window": request.streaming_window,
        "max_thinking_tokens": request.max_thinking_tokens,
        "resume": request.emitted,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "stop_regex": sampling.stop_regex,
        "bad_words": sampling.bad_words,
        _grammar_name(request): request.grammar,
    }
    for name, value in taken.items():
        if value:
            raise InvalidRequest(f"{name}: not with beam search, leave it out", name)
    if sampling.stop and tokenizer is None:
        raise InvalidRequest("stop: the server runs with --skip-tokenizer-init", "stop")
    if sampling.n > (sampling.beam_width or 1):
        raise InvalidRequest(
            f"n ({sampling.n}) must not be more than beam_width ({sampling.beam_width})", "n"
        )
    if sampling.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens: a beam search needs at least 1", "max_new_tokens")

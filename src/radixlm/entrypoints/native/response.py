"""The answers of ``/generate``, over HTTP and from the offline engine."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from radixlm.entrypoints import beam_search
from radixlm.entrypoints.native.request import Batch
from radixlm.entrypoints.request_options import answer_error
from radixlm.entrypoints.sequences import cached_details, num_logprobs, paced
from radixlm.intake.records import Output
from radixlm.intake.tokenizer_manager import TokenizerManager
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.replies import Finish, Logprob, TopLogprobs
from radixlm.wire.requests import LogprobParams
from radixlm.wire.unknown import note_warning

MANY_LOGPROBS = 1024
DIGEST_DIGITS = 8  # of an adapter, enough to tell versions apart
_OF_BEAM = ("finish_reason", "sequence_score")
# (number of log-probabilities, work, its arguments) -> its result
InThread = Callable[..., Awaitable[Any]]


class ResponseBuilder:
    """Makes the answers of one call from Outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        batch: Batch,
        weight_version: str,
        dim: int = 0,
        has_times: bool = False,
    ) -> None:
        """``dim``: numbers of a hidden state. ``has_times``: tell when things happened."""
        self._tokenizer, self._batch, self._version = tokenizer, batch, weight_version
        self._dim, self._has_times = dim, has_times
        self._began_s = time.monotonic()
        # text of disjoint answers, by prompt and sample
        self._earlier: dict[tuple[int, int], str] = {}
        # of samples that reason: their tokens, and how many belong to the reasoning
        self._output_ids: dict[tuple[int, int], list[int]] = {}
        self._reasoned: dict[tuple[int, int], int] = {}
        self.last_finish = Finish("abort")  # of the sample that ended last
        self.num_logprobs = 0  # of the last answer

    def response(self, index: int, output: Output) -> dict[str, Any]:
        """The finished answer of sample ``output`` of prompt ``index``."""
        self.num_logprobs = num_logprobs(output)
        answer: dict[str, Any] = {}
        if self._tokenizer is not None:
            answer["text"] = output.text
        answer["output_ids"] = output.token_ids
        request = self._batch.requests[index]
        if request.shows_prompt_ids:
            prompt = request.prompt
            ids = request.input_ids if prompt is None else prompt.plain.tolist()
            answer["prompt_token_ids"] = ids
        answer["meta_info"] = self._meta(index, output)
        return answer

    def joined(self, index: int, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers of a prompt; those of a beam search as SGLang's one answer, which is the best
        and holds all of them."""
        if not self._batch.requests[index].sampling.beam_width or self._batch.stream:
            return answers
        first, meta = answers[0], answers[0]["meta_info"]
        meta["completion_tokens"] = sum(one["meta_info"]["completion_tokens"] for one in answers)
        results = [
            {name: one[name] for name in ("output_ids", "text") if name in one}
            | {"meta_info": {name: one["meta_info"].get(name) for name in _OF_BEAM}}
            for one in answers
        ]
        results[0]["meta_info"] = dict(meta)
        return [first | {"meta_info": meta | {"beam_results": results}}]

    def _meta(self, index: int, output: Output) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": finish_reason(output.finish, output.completion_tokens),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "weight_version": output.weight_version or self._version,
            "num_retractions": output.retractions,
            "queue_time": output.queue_time_s,
            **_score(output),
        }
        if (details := cached_details(output)) is not None:
            meta["cached_tokens_details"] = details
        if self._batch.requests[index].requires_reasoning:
            meta["reasoning_tokens"] = self._reasoning_tokens(index, output)
        if output.adapter is not None:
            meta["lora_name"] = output.adapter.name
            meta["lora_digest"] = output.adapter.digest[:DIGEST_DIGITS]
        if output.finish is not None:
            self.last_finish = output.finish
            meta["e2e_latency"] = seconds = time.monotonic() - self._began_s
            if self._has_times:
                meta |= _times(output, seconds)
            meta |= spec_fields(output)
            self._add_check(index, output, meta)
        if self._batch.wants_logprobs[index]:
            self._add_logprobs(self._batch.requests[index].logprobs, output, meta)
        need = self._batch.requests[index].logprobs
        if need is not None and need.kept:
            meta |= sampling_mask(output)
        if need is not None and need.entropy:
            found = output.logprobs
            meta["output_token_entropy_val"] = found.entropy if found is not None else []
        if output.hidden_states is not None:
            only_last = any(self._batch.wants_last_hidden[index : index + 1])
            rows = last_hidden if only_last else hidden_rows
            meta["hidden_states"] = rows(output, self._dim)
        if output.finish is not None and output.routed_experts is not None:
            meta["routed_experts"] = routed_experts(output)
        if output.pooled is not None:
            meta["pooled"] = output.pooled
        return meta

    def _reasoning_tokens(self, index: int, output: Output) -> int:
        """Tokens of the output up to the end marker of the reasoning, and with it; all tokens
        before it has come."""
        sample = index, output.index
        if sample in self._reasoned:
            return self._reasoned[sample]
        ids, first = self._output_ids.setdefault(sample, []), output.completion_tokens
        first -= len(output.token_ids)  # of the tokens that are new
        ids[first:] = output.token_ids
        marker = self._batch.requests[index].reasoning_end or ""
        end = self._tokenizer.encode(marker, False) if self._tokenizer is not None else []
        for i in range(max(0, first - len(end)), len(ids)):
            if ids[i : i + len(end)] == end:
                self._reasoned[sample] = i + len(end)
                del self._output_ids[sample]
                return i + len(end)
        return len(ids)

    def _add_check(self, index: int, output: Output, meta: dict[str, Any]) -> None:
        """Tell of an answer that breaks a keyword of its schema which is not enforced."""
        earlier = self._earlier.get((index, output.index), "")
        error = answer_error(self._batch.requests[index].unheld, output, earlier + output.text)
        if error:
            meta["schema_error"] = error
            note_warning(f"sample {output.index}: {error}")

    def _add_logprobs(
        self, need: LogprobParams | None, output: Output, meta: dict[str, Any]
    ) -> None:
        assert need is not None
        for side, got in (("input", output.prompt_logprobs), ("output", output.logprobs)):
            chosen = got.chosen if got else []
            meta[f"{side}_token_logprobs"] = [self._chosen(c) for c in chosen]
            if side == "output":  # so far, also where an answer holds only what is new
                meta["output_token_logprobs_length"] = output.completion_tokens
            if need.top:
                meta[f"{side}_top_logprobs"] = [self._top(t) for t in (got.top if got else [])]
            if need.token_ids:
                asked = got.asked if got else []
                meta[f"{side}_token_ids_logprobs"] = [self._top(t) for t in asked]

    def _chosen(self, chosen: Logprob) -> list[Any]:
        return [chosen[0], chosen[1], self._text_of(chosen[1])]

    def _top(self, top: TopLogprobs | None) -> list[Any] | None:
        return None if top is None else [[lp, t, self._text_of(t)] for lp, t in top]

    def _text_of(self, token_id: int) -> str | None:
        if not self._batch.logprob_text or self._tokenizer is None:
            return None
        return self._tokenizer.token_text(token_id)

    async def stream(
        self, intake: TokenizerManager, in_thread: InThread | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Answers so far, one as often as something is new; cumulative unless disjoint.
        ``in_thread``: makes those with many log-probabilities."""
        queue: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for output in beam_search.stream(intake, self._batch.requests[index]):
                    await queue.put((index, output))
                await queue.put(None)
            except Exception as error:  # handed to the reader, who raises it
                await queue.put(error)

        tasks = []
        total: dict[tuple[int, int], Output] = {}
        left = len(self._batch.requests)
        try:
            async for task in paced(asyncio.create_task(pump(i)) for i in range(left)):
                tasks.append(task)
            while left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    left -= 1
                    continue
                index, output = event
                answered = total.get((index, output.index), output)
                if in_thread is not None and num_logprobs(answered) > MANY_LOGPROBS:
                    yield await in_thread(num_logprobs(answered), self._event, index, output, total)
                else:
                    yield self._event(index, output, total)
        finally:
            for task in tasks:
                task.cancel()

    def _event(
        self, index: int, output: Output, total: dict[tuple[int, int], Output]
    ) -> dict[str, Any]:
        key = (index, output.index)
        if key in total and not self._batch.stream_disjoint:
            total[key].absorb(output)
        else:
            if key in total and self._batch.requests[index].unheld is not None:
                self._earlier[key] = self._earlier.get(key, "") + total[key].text
            if key in total and (known := total[key].routed_experts):
                known.extend(output.routed_experts or ())
                output.routed_experts = known
            total[key] = output
        answer = self.response(index, total[key])
        answer["output_ids"] = list(answer["output_ids"])
        if self._batch.is_list:
            answer["index"] = index * self._batch.requests[index].sampling.n + output.index
        return answer


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """``meta_info.finish_reason``: null while the sample runs."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": length}
    return {
        "type": "abort",
        "message": finish.message or "aborted",
        "status_code": finish.status or None,
        "err_type": None if finish.kind == "abort" else "EngineError",
    }


def _score(output: Output) -> dict[str, float]:
    return {} if output.score is None else {"sequence_score": output.score}


def spec_fields(output: Output) -> dict[str, Any]:
    """What became of a sample's drafts, under SGLang's names; {} where nothing drafts. A round is
    a step that verified drafts: steps without are not counted."""
    if output.draft_rounds is None:
        return {}
    rounds = sum(output.draft_rounds)
    accepted = sum(count * times for count, times in enumerate(output.draft_rounds))
    return {
        "spec_verify_ct": rounds,
        "spec_accept_length": 1 + accepted / rounds if rounds else 0.0,
        "spec_accept_rate": accepted / output.num_drafted if rounds else 0.0,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": output.num_drafted,
        "spec_correct_drafts_histogram": output.draft_rounds,
    }


def sampling_mask(output: Output) -> dict[str, Any]:
    """What each token was drawn from, and its log-probability among them, under SGLang's names."""
    kept = output.logprobs.kept if output.logprobs else []
    return {
        "output_token_sampling_mask": [ids for _, ids in kept],
        "output_token_sampling_logprobs": [logprob for logprob, _ in kept],
        "output_token_sampling_mask_length": output.completion_tokens,
    }


def hidden_rows(output: Output, dim: int) -> list[Any]:
    """Hidden states as the reference gives them, an entry a step: the rows of the prompt together,
    then one row a token. ``dim`` numbers a row; what has come last is at the end of ``output``."""
    rows = np.frombuffer(b"".join(output.hidden_states or ()), np.float32)
    rows = rows.reshape(-1, dim if dim and not len(rows) % dim else max(1, len(rows)))
    num_placeholders = output.prompt_tokens + max(output.completion_tokens - 1, 0)
    num_prompt = min(len(rows), max(0, output.prompt_tokens - (num_placeholders - len(rows))))
    prompt = [rows[:num_prompt].tolist()] if num_prompt else []
    return [*prompt, *rows[num_prompt:].tolist()]


def routed_experts(output: Output) -> str:
    """The experts of each token from ``routed_experts_start_len`` on but the last, which is not
    computed: the base64 of int32 [tokens, layers, top_k]."""
    return base64.b64encode(b"".join(output.routed_experts or ())).decode()


def last_hidden(output: Output, dim: int) -> list[float]:
    """The hidden state of the last place, all that OpenAI's routes give."""
    rows = np.frombuffer((output.hidden_states or [b""])[-1], np.float32)
    return list(rows[-dim:].tolist())


def _times(output: Output, seconds: float) -> dict[str, float]:
    """Of a sample that has just ended, ``seconds`` after the request came; in seconds since the
    epoch, and tokens a second."""
    now_s = time.time()
    times = {"request_received_ts": now_s - seconds, "request_finished_ts": now_s,
             "response_sent_to_client_ts": now_s}  # fmt: skip
    decode_s = seconds - output.prefill_s
    if output.completion_tokens > 1 and output.prefill_s and decode_s > 0:
        times["decode_throughput"] = (output.completion_tokens - 1) / decode_s
    return times

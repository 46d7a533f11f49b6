"""Calls by the fields of ``/generate``: the same for a server and for an engine in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from radixlm.lang.backend.base_backend import BaseBackend
from radixlm.lang.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    drawn,
    mean_logprob,
    token_length_normalized,
)
from radixlm.lang.global_config import global_config

if TYPE_CHECKING:
    from radixlm.lang.executor import StreamExecutor
    from radixlm.lang.ir import SglSamplingParams

_NOTHING = {"max_new_tokens": 0, "temperature": 0}


_NEW_ONLY = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def continued(earlier: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """The meta_info of an event that holds only what is new, with the log-probabilities of the
    events before it."""
    lists = {name: [*(earlier.get(name) or ()), *(meta.get(name) or ())] for name in _NEW_ONLY}
    return meta | {name: listed for name, listed in lists.items() if listed}


def newest(earlier: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """``meta`` with those log-probabilities only that ``earlier`` does not have."""
    lists = {name: meta[name][len(earlier.get(name) or ()) :] for name in _NEW_ONLY if name in meta}
    return meta | lists


class GenerateBackend(BaseBackend):
    """``_post`` answers a body of /generate, ``_stream`` gives its events.
    ``has_score_choices``: whether it scores choices by one request."""

    has_score_choices = False

    @property
    def streams_new_text(self) -> bool:
        """Whether an event holds only what is new (--incremental-streaming-output)."""
        return False

    @abstractmethod
    def _post(self, body: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], Any]:
        return results(self._post(self._body(s, sampling_params)))

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        length, meta = 0, dict[str, Any]()
        for event in self._stream({**self._body(s, sampling_params), "stream": True}):
            meta = (
                continued(meta, event["meta_info"]) if self.streams_new_text else event["meta_info"]
            )
            yield event["text"][length:], meta
            length = 0 if self.streams_new_text else len(event["text"])

    def cache_prefix(self, prefix_str: str) -> None:
        self._post({"text": prefix_str, "sampling_params": _NOTHING})

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        """Score each choice by its log-probabilities behind the text, and those of up to two tokens
        before it: where a tokenizer joins the text's last token with the choice's first, the joined
        token counts."""
        method = choices_method or token_length_normalized
        scored = self._scored(s, choices)
        inputs = [
            _from_boundary(one["meta_info"]["input_token_logprobs"], s.text_) for one in scored
        ]
        alone = None
        if method.requires_unconditional_logprobs:
            ids = [[token[1] for token in tokens] for tokens in inputs]
            answers = self._scores({"input_ids": ids}, logprob_start_len=0)
            alone = [one["meta_info"]["input_token_logprobs"] for one in answers]
        decision = method(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(tokens) for tokens in inputs],
            input_token_logprobs=inputs,
            output_token_logprobs=[one["meta_info"]["output_token_logprobs"] for one in scored],
            unconditional_token_logprobs=alone,
        )
        return drawn(decision, choices, temperature)

    def _scored(self, s: StreamExecutor, choices: list[str]) -> list[dict[str, Any]]:
        """The answers with log-probabilities of each choice and of up to two tokens before it."""
        media = _media(s)
        if self.has_score_choices and not media:
            return self._scores({"text": s.text_, "score_choices": choices, **_deadline(s)})
        prefix = self._post({"text": s.text_, "sampling_params": _NOTHING, **media, **_deadline(s)})
        return self._scores(
            {"text": [s.text_ + choice for choice in choices], **_for_each(media, len(choices))},
            logprob_start_len=max(prefix["meta_info"]["prompt_tokens"] - 2, 0),
            **_deadline(s),
        )

    def _scores(self, prompts: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        logprobs = {"return_logprob": True, "return_text_in_logprobs": True}
        body = {**prompts, "sampling_params": _NOTHING, **logprobs, **more}
        answers: list[dict[str, Any]] = self._post(body)
        return answers

    def _body(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        params = sampling_params.constrained()
        return {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
                **params.to_srt_kwargs(),
            },
            **params.logprob_fields(),
            **_media(s),
            **_deadline(s),
        }


def results(answer: Any) -> tuple[str | list[str], Any]:
    """Text and meta_info of an answer of /generate, lists of both for n > 1."""
    if isinstance(answer, list):
        return [one["text"] for one in answer], [one["meta_info"] for one in answer]
    return answer["text"], answer["meta_info"]


def _from_boundary(tokens: list[Any], before: str) -> list[Any]:
    """The tokens that count for a choice, as SGLang counts them: those behind the last but one of
    ``before``, and that one too unless ``before`` ends with it."""
    return tokens[1:] if len(tokens) > 1 and before.endswith(tokens[0][-1]) else tokens


def _media(s: StreamExecutor) -> dict[str, Any]:
    """image_data and video_data of a program, in order."""
    videos = [data.removeprefix("video:") for _, data in s.images_ if data.startswith("video:")]
    images = [data for _, data in s.images_ if not data.startswith("video:")]
    fields: dict[str, Sequence[str]] = {"image_data": images, "video_data": videos}
    return {name: values for name, values in fields.items() if values}


def _deadline(s: StreamExecutor) -> dict[str, float]:
    """The seconds that the program's budget leaves."""
    left_s = s.budget.left_s() if s.budget is not None else None
    return {} if left_s is None else {"timeout": max(left_s, 0.001)}


def _for_each(media: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: [values] * count for name, values in media.items()}

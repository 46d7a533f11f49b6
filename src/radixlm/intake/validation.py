"""Whether a request can be served, and its prompt and parameters as they will be used."""

import secrets
from collections.abc import Callable, Sequence

import msgspec

from radixlm.base.errors import InvalidRequest, PromptTooLong
from radixlm.base.record import Record
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.records import GenerateRequest
from radixlm.text.tokenizer import Tokenizer
from radixlm.wire.sampling_params import SamplingParams

ENDLESS = 1 << 30  # tokens of a request with a streaming window, at most
PROCESSOR = "custom_logit_processor"
SAFE_WAY = (
    "Serialised code is never run: the operator registers a class with --logit-processor "
    "name=module:Class, and requests send its name and custom_params (docs/logit-processors.md)"
)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, with and without a space before it. InvalidRequest without a
    tokenizer."""
    if words and tokenizer is None:
        raise InvalidRequest(
            "bad_words: the server runs with --skip-tokenizer-init; send logit_bias", "bad_words"
        )
    assert tokenizer is not None or not words
    texts = [text for word in words for text in (word, f" {word}")]
    found = (tuple(tokenizer.encode(text, False)) for text in texts) if tokenizer else ()
    return tuple(dict.fromkeys(ids for ids in found if ids))


def score_after(request: GenerateRequest, num_start: int, num_ids: int) -> None:
    """Ask for the log-probabilities behind ``scored_after``, of ``num_start`` tokens, and of two
    tokens before: the last of them may be joined with what follows."""
    if request.logprobs is not None:
        start = max(min(num_start, num_ids) - 2, 0)  # the whole may have fewer tokens
        request.logprobs = msgspec.structs.replace(request.logprobs, prompt_from=start)


CheckOutputs = Callable[[IntakeFacts, GenerateRequest, int, int], int]
"""Given the tokens of a prompt and the most new ones: how many these may be, with what a request
wants of each. InvalidRequest where the server does not give it."""


class RequestValidator(Record):
    """The facts and the tokenizer that requests are held against."""

    facts: IntakeFacts
    tokenizer: Tokenizer | None
    check_outputs: CheckOutputs | None = None

    def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids, cut to the context with --allow-auto-truncate."""
        is_pooled = request.pooling is not None
        if request.embeds is not None:
            ids = self._embed_ids(request.embeds, request.num_embeds)
        elif request.prompt is not None:
            ids = request.prompt.ids.tolist()
            num_media = sum(one.num_placeholders for one in request.prompt.media)
            return self._fit(ids, is_pooled, may_cut=False, num_media=num_media)
        elif request.input_ids is not None:
            ids = request.input_ids
            self._fit(ids, is_pooled)  # before millions of them are looked at
            bad = next((i for i in ids if not 0 <= i < self.facts.vocab), None)
            if bad is not None:
                raise InvalidRequest(
                    f"input_ids: {bad} is not a token id; the vocabulary has {self.facts.vocab}",
                    param="input_ids",
                )
        elif request.text is not None:
            if self.tokenizer is None:
                raise InvalidRequest(
                    "text: the server runs with --skip-tokenizer-init; send input_ids",
                    param="text",
                )
            ids = self.tokenizer.encode(request.text, request.add_special_tokens)
            if request.scored_after is not None:
                start = self.tokenizer.encode(request.scored_after, request.add_special_tokens)
                score_after(request, len(start), len(ids))
        else:
            raise InvalidRequest("one of text, input_ids and input_embeds is needed", param="text")
        if not ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="text")
        fitting = self._fit(ids, is_pooled)
        if request.shows_prompt_ids:
            request.text, request.input_ids = None, fitting
        return fitting

    def kind(self, request: GenerateRequest) -> None:
        """InvalidRequest where the model cannot give what is asked for: tokens, or vectors."""
        if request.pooling is not None and self.facts.is_generation:
            raise InvalidRequest(
                "this model generates text; start the server with --is-embedding to get vectors "
                "from it"
            )
        if request.pooling is None and not self.facts.is_generation:
            raise InvalidRequest(
                "this model gives vectors or scores and generates no text; ask /v1/embeddings, "
                "/v1/rerank or /classify"
            )

    def _embed_ids(self, embeds: bytes, num_embeds: int) -> list[int]:
        """Placeholders for rows of input embeddings, which cannot be shortened."""
        dim = self.facts.embed_dim or len(embeds) // (4 * num_embeds or 1)
        if len(embeds) != 4 * num_embeds * dim:
            raise InvalidRequest(
                f"input_embeds: {len(embeds) // 4} numbers in {num_embeds} rows; the model's "
                f"embeddings have {dim} numbers",
                param="input_embeds",
            )
        if num_embeds >= self.facts.context_len:
            raise PromptTooLong(
                f"input_embeds has {num_embeds} rows; the context is {self.facts.context_len} "
                "tokens and at least one is needed for the answer."
                + self.facts.more_room(num_embeds + 1),
                param="input_embeds",
            )
        return [0] * num_embeds

    def _fit(
        self, ids: list[int], is_pooled: bool, *, may_cut: bool = True, num_media: int = 0
    ) -> list[int]:
        most = self.facts.context_len - (not is_pooled)
        if len(ids) <= most:
            return ids
        if is_pooled:
            raise PromptTooLong(
                f"{PromptTooLong.maximum(most)}, the text has {len(ids)}: "
                "cut it or start with --allow-auto-truncate." + self.facts.more_room(len(ids)),
                param="input",
            )
        if self.facts.allow_auto_truncate and may_cut:
            return ids[:most]
        of_media = f", {num_media} of them of images, videos or audio clips" if num_media else ""
        raise PromptTooLong(
            f"The input ({len(ids)} tokens{of_media}) is longer than the model's context length "
            f"({self.facts.context_len} tokens). At least one is needed for the answer."
            + self.facts.more_room(len(ids) + 1),
            param="prompt",
        )

    def sampling(self, request: GenerateRequest, num_prompt: int) -> SamplingParams:
        """The parameters with the number of tokens, the seed and all stop ids settled."""
        sampling = request.sampling
        sampling.validate(self.facts.vocab)
        room = self.facts.context_len - num_prompt
        asked, most = sampling.max_new_tokens, self.facts.max_new_tokens
        if most is not None:
            asked = min(room if asked is None else asked, most)
        clamps = self.facts.clamp_max_tokens or self.facts.allow_auto_truncate
        if asked is not None and asked > room and not (clamps or request.clamp_max_tokens):
            raise PromptTooLong(
                f"max_completion_tokens is too large: {asked}. Requested token count exceeds the "
                f"model's maximum context length of {self.facts.context_len} tokens "
                f"({num_prompt} of the prompt): ask max_tokens for {room} or fewer."
                + self.facts.more_room(num_prompt + asked),
                param="max_tokens",
            )
        count = room if asked is None else min(asked, room)
        if self.check_outputs is not None:
            count = self.check_outputs(self.facts, request, num_prompt, count)
        self._check_choices(request)
        seed = sampling.sampling_seed
        if seed is None:
            seed = secrets.randbits(62)
        return msgspec.structs.replace(
            sampling,
            max_new_tokens=count,
            sampling_seed=seed,
            stop_token_ids=(
                *(i for i in sampling.stop_token_ids if 0 <= i < self.facts.vocab),
                *self._special_stops(sampling),
            ),
        )

    def _special_stops(self, sampling: SamplingParams) -> list[int]:
        """Ids of stop strings that name a special token: skipped tokens have no text to match."""
        if self.tokenizer is None or not sampling.skip_special_tokens:
            return []
        ids = [self.tokenizer.token_id(text) for text in sampling.stop]
        return [i for i in ids if i is not None and self.tokenizer.is_special(i)]

    def _check_choices(self, request: GenerateRequest) -> None:
        """What a request names must be there: the engine takes it for granted."""
        name, known = request.processor, self.facts.processors
        if name is not None and name not in known:
            has = ", ".join(known) or "none"
            raise InvalidRequest(
                f"{PROCESSOR}: {name!r:.80} is not known here; known: {has}. {SAFE_WAY}", PROCESSOR
            )

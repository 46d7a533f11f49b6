"""Requests that go on behind output which their client has."""

from collections.abc import Sequence

from radixlm.base.errors import InvalidRequest
from radixlm.intake.request_state import RequestState
from radixlm.wire.replies import TokenDelta


def preload(states: Sequence[RequestState], emitted: Sequence[int], vocab: int) -> None:
    """Give the samples output that their client has (``resume.num_emitted``)."""
    bad = next((token for token in emitted if not 0 <= token < vocab), None)
    if bad is not None:
        text = f"input_ids: {bad} is not a token id; the vocabulary has {vocab}"
        raise InvalidRequest(text, "input_ids")
    for state in states:
        if len(emitted) >= (state.wire.sampling.max_new_tokens or 0):
            raise InvalidRequest(
                f"resume.num_emitted: {len(emitted)} is all that max_new_tokens "
                f"{state.wire.sampling.max_new_tokens} allows: ask for more tokens",
                "resume.num_emitted",
            )
        state.replay([TokenDelta(state.rid, list(emitted))])
        if state.ended:
            text = "resume.num_emitted: these tokens hold a stop string, nothing comes after them"
            raise InvalidRequest(text, "resume.num_emitted")

"""What belongs to the tokens that are left after a stop string's cut."""

from __future__ import annotations

import pytest

from radixlm.hidden_outputs.token_rows import TokenRows
from radixlm.intake.facts import IntakeFacts
from radixlm.intake.request_state import RequestState, _cut
from radixlm.wire.replies import Finish, Logprobs, TokenDelta
from radixlm.wire.requests import TokenizedRequest, pack_ids
from radixlm.wire.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("count", "kept"), [(3, ["p1", "p2", "h2", "h3"]), (2, ["p1", "p2", "h2"]), (1, ["p1", "p2"])]
)
def test_hidden_states_of_a_prompt_in_chunks_are_kept(count: int, kept: list[str]) -> None:
    """The first token comes from the last part of the prompt, of which there may be several."""
    parts = [part.encode() for part in ("p1", "p2", "h2", "h3")]
    delta = TokenDelta("r", [7, 8, 9], hidden_states=parts)
    cut = _cut(delta, count)
    assert cut.tokens == [7, 8, 9][:count]
    assert cut.hidden_states == [part.encode() for part in kept]
    assert cut.logprobs is None and delta.tokens == [7, 8, 9]


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    told = Logprobs([-0.1, -0.2, -0.3], [[(-0.1, 7)], [(-0.2, 8)], [(-0.3, 9)]], [[], [], []])
    cut = _cut(TokenDelta("r", [7, 8, 9], logprobs=told), 2).logprobs
    assert cut is not None and len(cut.chosen) == len(cut.top) == len(cut.asked) == 2
    assert cut.chosen == [-0.1, -0.2]


class _Letters:
    """A detokenizer of which each token id is a character."""

    def feed(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize(("matched", "text"), [(None, "ab!"), (33, "ab")])
def test_only_a_token_that_ended_the_text_is_cut(matched: int | None, text: str) -> None:
    """A grammar that is complete where the model has no EOS ends with a token of its own."""
    wire = TokenizedRequest("r", pack_ids([1]), SamplingParams())
    state = RequestState(wire, 0, _Letters(), None)  # type: ignore[arg-type]
    state.apply_delta(TokenDelta("r", [97, 98, 33], finish=Finish("stop", matched=matched)))
    output = state.read()
    assert output is not None and output.text == text and output.token_ids == [97, 98, 33]


@pytest.mark.parametrize("with_hidden", [True, False])
def test_experts_of_a_new_engine_come_once(with_hidden: bool) -> None:
    """Rows of two bytes of a hidden state, where it is wanted, and three of experts."""

    def rows(*numbers: int) -> bytes:
        return b"".join((b"h%d" % n if with_hidden else b"") + b"e%02d" % n for n in numbers)

    wire = TokenizedRequest(
        "r", pack_ids([1, 2, 3]), SamplingParams(), return_hidden_states=with_hidden,
        return_routed_experts=True,
    )  # fmt: skip
    state = RequestState(wire, 0, _Letters(), None)  # type: ignore[arg-type]
    state.rows = rows_of_tokens = TokenRows(wire, 1, IntakeFacts(9, 9))
    rows_of_tokens._row_bytes, rows_of_tokens._skip_routed = (2 * with_hidden, 3), 3
    state.apply_delta(TokenDelta("r", [97], hidden_states=[rows(0, 1), rows(2)]))
    state.resume_request()
    state.apply_delta(TokenDelta("r", [98], hidden_states=[rows(0, 1, 2, 3)]))
    last = TokenDelta("r", [99], finish=Finish("length"), hidden_states=[rows(4)])
    state.apply_delta(last)
    output = state.read()
    assert output is not None and output.routed_experts is not None
    assert b"".join(output.routed_experts) == b"e01e02e03e04"
    hidden = b"".join(output.hidden_states or ())
    assert hidden == (b"h0h1h2h3h4" if with_hidden else b"")

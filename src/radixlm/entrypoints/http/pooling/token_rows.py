"""A vector, or scores, of each token: vLLM's tasks token_embed and token_classify of /pooling."""

from collections.abc import Sequence

import numpy as np

from radixlm.arch.spec import Dense, Pool
from radixlm.base.errors import InvalidRequest
from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.records import GenerateRequest, Output

MAX_NUMBERS = 1 << 23  # of all rows of a call


def check_rows(state: ServerState, pool: Pool, requests: Sequence[GenerateRequest]) -> None:
    """InvalidRequest where the model has no rows of tokens, or ``requests`` have too many."""
    if "+" in pool.pooling:
        raise InvalidRequest("task: this model joins several poolings, tokens have none", "task")
    if state.media is not None and state.media.embeds_images and any(r.prompt for r in requests):
        raise InvalidRequest("task: an image has one vector here, and none of tokens", "task")
    prompts = [
        one.prompt.ids if one.prompt is not None else one.input_ids or () for one in requests
    ]
    count = sum(map(len, prompts)) * _width(state, pool)
    if count > MAX_NUMBERS:
        raise InvalidRequest(
            f"task: the rows of these tokens are {count} numbers, a call may have {MAX_NUMBERS}: "
            "send fewer or shorter inputs",
            "task",
        )


def rows_of(state: ServerState, pool: Pool, output: Output) -> list[list[float]]:
    """The rows of an Output: of its tokens, or of the steps that the model scores."""
    if pool.pooling == "steps":
        numbers = np.asarray(output.pooled or ())
    else:
        numbers = np.frombuffer(b"".join(output.hidden_states or ()), np.float32)
    return list(numbers.reshape(-1, _width(state, pool)).tolist())


def _width(state: ServerState, pool: Pool) -> int:
    """Numbers of a row."""
    if pool.after in ("second", "gated"):
        return 1
    sizes = [step.outputs for step in pool.head if isinstance(step, Dense)]
    return sizes[-1] if sizes else state.intake.facts.embed_dim

"""How far the prompts of a stream are computed, as comments of server-sent events, for clients that
send the header ``X-Prefill-Progress``. Others may not know that such lines are to be left out.

    : prefill 32768 of 120000
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from radixlm.entrypoints.http.state import ServerState
from radixlm.intake.call import current_call
from radixlm.live_feed.rows import RequestRows

PROGRESS = "x-prefill-progress"
EVERY_S = 2.0


async def comments(first: asyncio.Future[Any], state: ServerState) -> AsyncIterator[bytes]:
    """A comment every two seconds until ``first`` is done."""
    while not (await asyncio.wait({first}, timeout=EVERY_S))[0]:
        num_done, num_all = _prefilled(state)
        yield f": prefill {num_done} of {num_all}\n\n".encode() if num_done else b": queued\n\n"


def _prefilled(state: ServerState) -> tuple[int, int]:
    """Tokens of the running call's prompts that are computed, and all of them; of those requests
    that have rows (not with --disable-ui)."""
    call, rows = current_call(), state.extras.get(RequestRows)
    if call is None or rows is None:
        return 0, 0
    known = [row for rid in call.rids if (row := rows.of(rid)) is not None]
    return sum(row.prefilled for row in known), sum(row.prompt for row in known)

"""EncoderBudget: how many media tokens one step may encode.

The multimodal encoder runs over a whole image, video or audio clip when a chunk reaches the first
of its placeholder tokens, even if the chunk holds few of them.
"""

from radixlm.scheduler.request import Request
from radixlm.wire.media import Media


class EncoderBudget:
    """The budget of one step; ``start_step`` restores it for the next."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = self._left = num_tokens
        self._started: set[bytes] = set()  # digests of the media that this step encodes

    def start_step(self) -> None:
        """Restore the whole budget."""
        self._left = self._num_tokens
        self._started.clear()

    def limit_chunk(self, request: Request, end: int) -> int:
        """Where a chunk of ``request`` that was to end at ``end`` must end: before the media that
        exceed the budget. The first media of a step may exceed it, or they would never run."""
        for media in request.wire.media:
            first = _first_uncached(media, request.num_cached)
            if not request.num_computed <= first < end or media.digest in self._started:
                continue
            if media.num_placeholders > self._left and self._started:
                return first
            self._left -= media.num_placeholders
            self._started.add(media.digest)
        return end


def _first_uncached(media: Media, num_cached: int) -> int:
    """The first placeholder behind the cached prefix; -1 if all are cached."""
    starts = (max(a, num_cached) for a, count in media.spans if a + count > num_cached)
    return next(starts, -1)

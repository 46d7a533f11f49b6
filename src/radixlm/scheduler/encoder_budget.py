"""How many places of media one step may have encoded: an encoder runs whole when a chunk reaches
the
first place of its media, however few of the places the chunk holds."""

from __future__ import annotations

from radixlm.scheduler.request import Request
from radixlm.wire.media import Media


class EncoderBudget:
    """Of one step; ``begin`` starts the next."""

    def __init__(self, places: int) -> None:
        self._places = self._left = places
        self._begun: set[bytes] = set()  # content of this step

    def begin(self) -> None:
        """A step: all of the budget is there again."""
        self._left = self._places
        self._begun.clear()

    def cut(self, request: Request, end: int) -> int:
        """Where a chunk of ``request`` that was to end there ends: before the media that would go
        beyond the budget. The first media of a step may, or it would never be encoded."""
        for media in request.wire.media:
            first = _first_from(media, request.num_cached)
            if not request.num_computed <= first < end or media.digest in self._begun:
                continue
            if media.num_placeholders > self._left and self._begun:
                return first
            self._left -= media.num_placeholders
            self._begun.add(media.digest)
        return end


def _first_from(media: Media, cached: int) -> int:
    """The first place of a media that no cache held; -1 if all are cached."""
    return next((max(a, cached) for a, count in media.spans if a + count > cached), -1)

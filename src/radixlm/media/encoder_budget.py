"""EncoderBudget: how many media tokens one step may encode.

The multimodal encoder runs over a whole image, video or audio clip when a chunk reaches the first
of its placeholder tokens, even if the chunk holds few of them.
"""

from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request
from radixlm.wire.media import Media


class EncoderBudget(Feature):
    """The budget of one step, in tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = self._left = num_tokens
        self._started: set[bytes] = set()  # digests of the media that this step encodes

    def begin_step(self) -> None:
        """Restore the whole budget."""
        self._left = self._num_tokens
        self._started.clear()

    def limit_chunk(self, request: Request, end: int) -> int:
        """Where a chunk of ``request`` that was to end at ``end`` must end: not inside a span of
        tokens that attend to each other, and before the media that exceed the budget, with the
        whole span that they are in.

        The first media of a step may exceed the budget, and so may all media of a span that this
        step begins with: they would never run otherwise."""
        if not request.wire.media:
            return end
        return self._limit_media(request, outside_of_spans(request, end))

    def _limit_media(self, request: Request, end: int) -> int:
        left, started = self._left, set(self._started)
        for media in request.wire.media:
            first = _first_uncached(media, request.num_cached)
            if not request.num_computed <= first < end or media.digest in started:
                continue
            if media.num_placeholders > left and started:
                cut = span_start(request, first)
                if cut > request.num_computed:
                    return self._limit_media(request, cut)
                if self._started:  # by other requests: the span waits for the next step
                    return request.num_computed
            left -= media.num_placeholders
            started.add(media.digest)
        self._left, self._started = left, started
        return end


def outside_of_spans(request: Request, end: int) -> int:
    """Where a chunk that was to end at ``end`` may end: not inside a span of tokens that attend to
    each other. A span is computed in one step, even if it is larger than the step's budget.

    A span that ignores windows has a step of its own, so that no later token of its sequence needs
    the window in the same step."""
    for media in request.wire.media:
        for start, count in media.bidirectional_spans:
            is_inside = start < end < start + count
            if is_inside and start > request.num_computed:
                return start
            if is_inside or (media.spans_ignore_window and request.num_computed <= start < end):
                return start + count
    return end


def span_start(request: Request, position: int) -> int:
    """The first token of the bidirectional span that ``position`` is inside; ``position`` if it is
    in none."""
    for media in request.wire.media:
        for start, count in media.bidirectional_spans:
            if start < position < start + count:
                return start
    return position


def _first_uncached(media: Media, num_cached: int) -> int:
    """The first placeholder behind the cached prefix; -1 if all are cached."""
    starts = (max(a, num_cached) for a, count in media.spans if a + count > num_cached)
    return next(starts, -1)

"""The hooks by which features take part in scheduling, called in the order of ``engine/assemble``.

    arrive(request)      a request has arrived             check it, begin to compile its grammar
    ready(request)       may it be admitted now?           is the grammar compiled, adapter loaded?
    begin_step()         a step is planned                 its budgets begin again
    limit_chunk(request) where may a prompt's chunk end?   media, spans, prompt log-probabilities
    drafts(request)      what do drafters propose?         grammar: cut it, add what is certain
    extend(items)        a step was planned                data for the executor, by name
    masks(items)         which tokens may be sampled?      grammar
    computed(request)    an item has more than tokens      keep it for the next delta
    committed(request)   tokens were appended              advance the grammar
    forced(request)      which tokens follow for certain?  jump forward
    deliver(delta)       a delta goes to intake            what was kept goes with it
    retracted(request)   it lost its slot and pages        let go what it has locked
    release(request)     the request is over               free its state
    tick()               messages were read                take what a thread has done
    flush()              the prefix cache is emptied       let go what is locked in it
    stats()              the load is reported              figures for metrics, by name

A feature keeps its state in a dict of its own by request id, and never imports another feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixlm.scheduler.request import Request
from radixlm.step.masks import Masks
from radixlm.step.plan import Item
from radixlm.step.result import ItemResult
from radixlm.wire.replies import TokenDelta


class Feature:
    """Base of features: every hook does nothing; a feature overrides those that it needs.

    ``follows``: a step may decode several tokens in turn for its requests: ``committed`` and
    ``forced`` need no token before the next is sampled, and its masks can follow (``Masks``)."""

    follows = False

    def arrive(self, request: Request) -> bool:
        """The request has arrived; raising RadixError refuses it. Whether ``committed`` and
        ``forced`` are to be called for it."""
        return True

    def ready(self, request: Request) -> bool:
        """Whether the request may be admitted now; raising RadixError fails it."""
        return True

    def prepared_s(self, request: Request) -> float:
        """When what ``ready`` waited for was done, in monotonic seconds; 0 if for nothing."""
        return 0.0

    def begin_step(self) -> None:
        """A step is about to be planned."""

    def limit_chunk(self, request: Request, end: int) -> int:
        """Where the request's next chunk ends that could go up to ``end``; its ``num_computed`` if
        it must wait for the next step."""
        return end

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        """Data for the executor that travels with the step's plan, by name."""
        return {}

    def drafts(self, request: Request, tokens: Sequence[int], room: int) -> Sequence[int]:
        """What a step verifies, at most ``room`` tokens, where drafters propose ``tokens`` (maybe
        none): drafts that cannot be accepted may be cut, and better ones put in their place. Asked
        of requests whose ``arrive`` was True."""
        return tokens[:room]

    def masks(self, items: Sequence[Item]) -> Masks:
        """See ``Masks``. The drafts are ``Items.drafts_of``; the masks of places that cannot be
        reached allow something."""
        return Masks()

    def computed(
        self, request: Request, item: Item, result: ItemResult, num_kept: int | None
    ) -> None:
        """An item's result has more than tokens. ``num_kept``: of an item that decodes, how many of
        its tokens were appended."""

    def deliver(self, delta: TokenDelta) -> None:
        """A delta is about to be sent."""

    def committed(self, request: Request, tokens: Sequence[int]) -> bool | None:
        """Tokens were appended to the request; raising RequestError fails it. True: its output is
        complete, and the request ends with the last of them."""
        return False

    def forced(self, request: Request) -> Sequence[int]:
        """Tokens that must follow the committed ones: they are appended without being sampled
        (``committed`` is called for them), and the next step computes them."""
        return ()

    def retracted(self, request: Request) -> None:
        """The request has lost its slot, so that others get its pages; it will run again."""

    def slid(self, request: Request) -> None:
        """Its streaming window has moved: ``ids`` are others, and no token is computed."""

    def release(self, request: Request) -> None:
        """The request is over: free its state."""

    def tick(self) -> None:
        """A turn of the loop begins."""

    def flush(self) -> None:
        """The prefix cache is about to be emptied; no request runs or waits."""

    def publish(self) -> None:
        """Subscribers want to hear of the whole prefix cache."""

    def stats(self) -> dict[str, float]:
        """Figures for metrics."""
        return {}


class Hooks:
    """All features; calls each hook of those that override it, in order."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        def overriding(name: str) -> tuple[Feature, ...]:
            default = getattr(Feature, name)
            return tuple(f for f in features if getattr(type(f), name) is not default)

        self.features = tuple(features)
        self._ready = overriding("ready")
        self._extend, self._masks = overriding("extend"), overriding("masks")
        self._drafts = overriding("drafts")
        self._committed, self._release = overriding("committed"), overriding("release")
        self._forced, self._tick = overriding("forced"), overriding("tick")
        self._begin_step, self._limit_chunk = overriding("begin_step"), overriding("limit_chunk")
        self._computed, self._deliver = overriding("computed"), overriding("deliver")
        self._token_features = {*self._committed, *self._forced}

    def arrive(self, request: Request) -> None:
        """Ask all features, and note whether ``committed`` and ``forced`` are to be called."""
        answers = [(feature, feature.arrive(request)) for feature in self.features]
        hooked = [f for f, wants in answers if wants and f in self._token_features]
        request.has_token_hook = bool(hooked)
        request.goes_on = all(feature.follows for feature in hooked)

    def ready(self, request: Request) -> bool:
        # every feature is asked, so that all of them prepare at the same time
        answers = [feature.ready(request) for feature in self._ready]
        return all(answers)

    def prepared_s(self, request: Request) -> float:
        return max((feature.prepared_s(request) for feature in self._ready), default=0.0)

    def begin_step(self) -> None:
        for feature in self._begin_step:
            feature.begin_step()

    def limit_chunk(self, request: Request, end: int) -> int:
        for feature in self._limit_chunk:
            end = feature.limit_chunk(request, end)
        return end

    def computed(
        self, request: Request, item: Item, result: ItemResult, num_kept: int | None
    ) -> None:
        for feature in self._computed:
            feature.computed(request, item, result, num_kept)

    def deliver(self, delta: TokenDelta) -> None:
        for feature in self._deliver:
            feature.deliver(delta)

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        for feature in self._extend:
            extras.update(feature.extend(items))
        return extras

    def masks(self, items: Sequence[Item]) -> Masks:
        """The masks of all features; several masks of one place are intersected, and where that
        leaves nothing the first holds: a grammar must go on or end."""
        answers = [feature.masks(items) for feature in self._masks]
        given = [one for one in answers if one or one.follow is not None]
        if len(given) == 1:
            return given[0]
        masks = Masks()
        for one in given:
            for index, mask in one.items():
                first = masks.setdefault(index, mask)
                if first is not mask:
                    both = first & mask
                    masks[index] = np.where(both.any(axis=-1, keepdims=True), both, first)
        return masks

    def drafts(self, request: Request, tokens: Sequence[int], room: int) -> Sequence[int]:
        """The drafts that every feature leaves."""
        for feature in self._drafts:
            tokens = feature.drafts(request, tokens, room)
        return tokens

    def committed(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether any feature says that the output is complete."""
        answers = [feature.committed(request, tokens) for feature in self._committed]
        return any(answers)

    def forced(self, request: Request) -> Sequence[int]:
        """The forced tokens of the first feature that has any."""
        return next((t for feature in self._forced if (t := feature.forced(request))), ())

    def retracted(self, request: Request) -> None:
        for feature in self.features:
            feature.retracted(request)

    def slid(self, request: Request) -> None:
        for feature in self.features:
            feature.slid(request)

    def release(self, request: Request) -> None:
        for feature in self._release:
            feature.release(request)

    def tick(self) -> None:
        for feature in self._tick:
            feature.tick()

    def flush(self) -> None:
        for feature in self.features:
            feature.flush()

    def publish(self) -> None:
        for feature in self.features:
            feature.publish()

    def stats(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for feature in self.features:
            figures.update(feature.stats())
        return figures

"""The fixed points at which a feature may speak, in the order of ``engine/assemble.py``.

    ready(request)       may it be admitted now?             grammar compile, adapter load
    take/give            does it fit?                        ledgers
    (``scheduler/kv_cache_manager.py``)
    order(queue)         who first?                          ``scheduler/queue.py``
    extend(items)        extra tensors of the step           adapters, media
    masks(items)         which tokens are allowed?           grammar
    accept               logits -> tokens                    the executor's sampler or verifier
    committed(request)   tokens are known                    grammar advance
    forced(request)      what follows them for certain?      grammar jump-forward
    release(request)     it is over                          free state, offload

A feature keeps its state in its own dict keyed by rid and never imports another feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixlm.scheduler.request import Request
from radixlm.step.plan import Item

Mask = NDArray[np.int32]


class Feature:
    """Answers nothing in particular; a feature overrides the hooks it needs."""

    def arrive(self, request: Request) -> bool:
        """The request has entered the queue. Whether ``committed`` and ``forced`` are to be asked
        about it. RadixError refuses it."""
        return True

    def ready(self, request: Request) -> bool:
        """Whether the request may be admitted now. RadixError fails it."""
        return True

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        """Extra data of the step, by name."""
        return {}

    def masks(self, items: Sequence[Item]) -> dict[int, Mask]:
        """Index of the item -> packed bitmask [ceil(vocab / 32)] of the allowed tokens."""
        return {}

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens have become known. Raising RequestError fails the request."""

    def forced(self, request: Request) -> Sequence[int]:
        """Tokens that follow the committed ones whatever the model says: they become known without
        being sampled (``committed`` is told), and are computed with the next step."""
        return ()

    def release(self, request: Request) -> None:
        """The request has left; free what was kept for it."""


class Hooks:
    """All features, called in order."""

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        def overriding(name: str) -> tuple[Feature, ...]:
            base = getattr(Feature, name)
            return tuple(f for f in features if getattr(type(f), name) is not base)

        self.features = tuple(features)
        self._ready = overriding("ready")
        self._extend, self._masks = overriding("extend"), overriding("masks")
        self._committed, self._release = overriding("committed"), overriding("release")
        self._forced = overriding("forced")
        self._followers = {*self._committed, *self._forced}

    def arrive(self, request: Request) -> bool:
        """Whether some feature follows the request's tokens."""
        answers = [(feature, feature.arrive(request)) for feature in self.features]
        return any(follows for feature, follows in answers if feature in self._followers)

    def ready(self, request: Request) -> bool:
        # every gate is asked, so that all of them work on it at once
        answers = [feature.ready(request) for feature in self._ready]
        return all(answers)

    def extend(self, items: Sequence[Item]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        for feature in self._extend:
            extras.update(feature.extend(items))
        return extras

    def masks(self, items: Sequence[Item]) -> dict[int, Mask]:
        """Masks of several features on one item are intersected."""
        found: dict[int, Mask] = {}
        for feature in self._masks:
            for index, mask in feature.masks(items).items():
                found[index] = found[index] & mask if index in found else mask
        return found

    def committed(self, request: Request, tokens: Sequence[int]) -> None:
        for feature in self._committed:
            feature.committed(request, tokens)

    def forced(self, request: Request) -> Sequence[int]:
        """The first feature that knows any speaks."""
        return next((t for feature in self._forced if (t := feature.forced(request))), ())

    def release(self, request: Request) -> None:
        for feature in self._release:
            feature.release(request)

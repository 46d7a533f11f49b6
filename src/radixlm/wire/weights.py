"""Which weights an engine serves: what intake tells one that starts, and all that are to change."""

from __future__ import annotations

import msgspec


class WeightsSource(msgspec.Struct, frozen=True):
    """Weights that came after the start. ``folder``: of the checkpoint; ``deltas``: folders of
    safetensors files whose tensors take the place of the checkpoint's, later ones first in rank.
    ``digest``: of all of it, hex; "" if it is not known yet."""

    folder: str
    load_format: str
    deltas: tuple[str, ...] = ()
    digest: str = ""

    @property
    def namespace(self) -> str:
        """What tells cached pages of these weights from those of others."""
        return f"#{self.digest[:32]}"

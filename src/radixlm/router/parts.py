"""The parts of the gateway: "module:attach", in the order in which they are attached."""

PARTS: tuple[str, ...] = ()

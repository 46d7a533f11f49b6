"""The parts of the gateway: "module:attach", in the order in which they are attached."""

PARTS: tuple[str, ...] = (
    "radixlm.router.metrics_routes:attach",
    "radixlm.router.control:attach",
    "radixlm.router.logs:attach",
    "radixlm.router.history.routes:attach",
    "radixlm.router.stored_files:attach",
    "radixlm.router.limits:attach",  # after the registry and the metrics
    "radixlm.router.kv_events_in:attach",
    "radixlm.router.dispatch:attach",
    "radixlm.router.drain:attach",
    "radixlm.router.rolling:attach",
    "radixlm.router.tokens_api:attach",  # after dispatch
    "radixlm.router.loads:attach",
    "radixlm.router.discovery.attach:attach",
    "radixlm.router.pd:attach",
    "radixlm.router.stalled:attach",
    "radixlm.router.hedge:attach",  # after pd
    "radixlm.router.sessions:attach",  # after pd
    "radixlm.router.traces:attach",
    "radixlm.router.page:attach",
)

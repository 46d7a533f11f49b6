"""KvEvents: the publishers of an engine's KV events, one for each group of requests."""

from __future__ import annotations

import logging
from functools import partial

from radixlm.base.errors import ConfigError
from radixlm.config.server_config import ServerConfig
from radixlm.engine.rank_processes import topology_of
from radixlm.kv_events.cached_pages import PublishedPages
from radixlm.kv_events.observers import BothEvents, describe
from radixlm.kv_events.options import read_options
from radixlm.kv_events.publisher import KvEventPublisher
from radixlm.memory.prefix.radix import RadixCache
from radixlm.scheduler.hooks import Feature
from radixlm.scheduler.request import Request

log = logging.getLogger(__name__)


class KvEvents(Feature):
    """Outlives the schedulers of its engine. As a feature it learns the adapters' names."""

    def __init__(
        self, config: ServerConfig, page_size: int, replica: int = 0, boot: int = 0
    ) -> None:
        """``boot``: how often the engine was started before. ConfigError if an endpoint cannot be
        had; a restarted engine then serves without events."""
        self._names: dict[str, str] = {}  # of adapters' digests
        self._publishers: list[KvEventPublisher] = []
        self._published: dict[int, PublishedPages] = {}  # of each group's cache
        self._page_size = page_size
        options = read_options(config.observe.kv_events_config, config.parallel.dp_size)
        num_groups = topology_of(config).attn_dp if options is not None else 0
        for rank in range(replica * num_groups, (replica + 1) * num_groups):
            assert options is not None
            try:
                self._publishers.append(KvEventPublisher(options, page_size, rank, boot))
            except ConfigError as error:
                self.close()
                if not boot:
                    raise
                log.error("no KV events until the next restart: %s", error)
                return

    def follow(self, cache: RadixCache, group: int) -> None:
        """Publish the changes of a group's new prefix cache."""
        if self._publishers:
            publisher, own = self._publishers[group], cache.events
            tell_all = partial(describe, cache)
            published = PublishedPages(publisher, self._page_size, self._names, tell_all)
            if cache.total_pages:
                describe(cache, published)
            self._published[group] = published
            cache.events = published if own is None else BothEvents(own, published)

    def arrive(self, request: Request) -> bool:
        if request.wire.adapter is not None:
            self._names[request.wire.adapter.digest] = request.wire.adapter.name
        return True

    def publish(self) -> None:
        for published in self._published.values():
            published.refresh()

    def close(self) -> None:
        """Free the endpoints."""
        while self._publishers:
            self._publishers.pop().close()

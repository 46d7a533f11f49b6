"""Tokens at the gateway: prompts for policies that route by them, ids sent beside messages, and the
routes of tokenizers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Final

from radixlm.base.errors import RadixError
from radixlm.base.lazy import load
from radixlm.hub.locate import Wanted, locate_model
from radixlm.router.call import Call
from radixlm.router.worker import Worker

if TYPE_CHECKING:
    from radixlm.router.app import Gateway
    from radixlm.router.gateway_tokenizer import GatewayTokenizer
    from radixlm.router.prefix_hashes import Namespace
    from radixlm.router.prompt import Prompt
    from radixlm.router.registry import Event

log = logging.getLogger(__name__)

LONG_BODY: Final = 4096  # bytes above which a prompt is tokenized in a thread
_CHATS: Final = frozenset(("/v1/chat/completions", "/invocations"))


class Tokens:
    """The tokenizers of one gateway, and what they are used for."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.options = gateway, gateway.options
        self.by_name: dict[str, GatewayTokenizer] = {}
        self._tried: set[str] = set()
        self._holdings: Any = None
        self._forwarded = gateway.metrics.counter(
            "radix_router_ids_forwarded_total",
            "Chats whose token ids were sent beside their messages, and why others' were not.",
            ("reason",),
        )
        gateway.metrics.gauge(
            "radix_router_kv_index",
            "The index of cached blocks: blocks, bytes, blocks refused, blocks without a parent, "
            "workers trusted, gaps, restarts, faulty messages.",
            self._index_figures,
            ("figure",),
        )
        gateway.metrics.gauge(
            "radix_router_cached_tokens",
            "Prompt tokens that were cached, of answers that tell: as expected, as told.",
            self._cached_figures,
            ("kind",),
        )

    # ---- prompts -------------------------------------------------------------------------------

    def prepare(self, call: Call) -> Awaitable[None] | None:
        """Set ``call.prompt`` where the policy asks for it; long prompts take a thread."""
        pools = self.gateway.dispatcher.pools.by_pool.values()
        policies = [policy for policy in pools if policy.wants_prompt]
        if not policies:
            return None
        for policy in policies:
            policy.holdings = self.holdings
        tokenizer = self.of(call)
        if len(call.body) > LONG_BODY:
            return self._prepare_long(call, tokenizer)
        call.prompt = self.prompt(call, tokenizer)
        return None

    async def _prepare_long(self, call: Call, tokenizer: GatewayTokenizer | None) -> None:
        call.prompt = await asyncio.to_thread(self.prompt, call, tokenizer)

    @property
    def holdings(self) -> Any:
        """What workers hold, made when the first policy asks."""
        if self._holdings is None:
            gateway = self.gateway
            self._holdings = load("radixlm.router.prompt:Holdings")(
                lambda: gateway.index, self.options
            )
            gateway.every(1.0, lambda: self._holdings.tick(time.monotonic()))
        return self._holdings

    def prompt(self, call: Call, tokenizer: GatewayTokenizer | None) -> Prompt | None:
        """The prompt of a call: its token ids if there is a tokenizer, else its text."""
        fields, namespace = call.fields, self._namespace(call)
        make, plain = (load(f"radixlm.router.prompt:{n}") for n in ("Prompt", "plain_prompt"))
        try:
            if tokenizer is not None and fields.get("input_ids") is None:
                if call.path in _CHATS and isinstance(fields.get("messages"), list):
                    return make(tokenizer.of_chat(fields), namespace)  # type: ignore[no-any-return]
                text = fields.get("text" if call.path == "/generate" else "prompt")
                if isinstance(text, str):
                    return make(tokenizer.of_text(text, True), namespace)  # type: ignore[no-any-return]
        except (RadixError, KeyError, TypeError, ValueError) as error:
            log.debug("the prompt of %s cannot be tokenized: %s", call.request_id, error)
        return plain(call, namespace)  # type: ignore[no-any-return]

    def splice(self, call: Call, worker: Worker) -> Mapping[str, Any]:
        """``input_ids`` for a worker that would make the same ids of the messages."""
        prompt = call.prompt
        if prompt is None or call.path not in _CHATS or self.options.disable_token_ids:
            return {}
        tokenizer, digest = self.of(call), worker.facts.get("prompt_digest")
        reason = "sent"
        if prompt.is_text or tokenizer is None:
            reason = "no_tokenizer"
        elif not digest or digest != tokenizer.digest:
            reason = "digest"
        elif not load("radixlm.router.gateway_tokenizer:is_plain")(call.fields):
            reason = "shape"
        self._forwarded.inc(reason)
        return {"input_ids": prompt.ids.tolist()} if reason == "sent" else {}

    def _index_figures(self) -> dict[tuple[str, ...], float]:
        index = self.gateway.index
        return index.figures() if index is not None else {}

    def _cached_figures(self) -> dict[tuple[str, ...], float]:
        policies = [p for p in self.gateway.dispatcher.pools.by_pool.values() if p.wants_prompt]
        return {
            ("expected",): float(sum(policy.num_predicted for policy in policies)),
            ("told",): float(sum(policy.num_cached for policy in policies)),
        }

    def forget(self, name: str) -> None:
        """The worker ``name`` holds nothing any more."""
        if self._holdings is not None:
            self._holdings.forget(name)

    def of(self, call: Call) -> GatewayTokenizer | None:
        """The tokenizer of the call's model; of the only model, whatever the call names."""
        found = self.by_name.get(call.model or "")
        if found is None and not self.options.enable_igw and self.by_name:
            found = next(iter(self.by_name.values()))
        return found

    def _namespace(self, call: Call) -> Namespace:
        """What cached pages depend on besides the tokens."""
        fields, model = call.fields, call.model
        adapter = fields.get("lora_path")
        if adapter is None and model is not None and model not in self.by_name:
            bases = {worker.model_id for worker in self.gateway.registry}
            is_listed = any(
                model in (worker.facts.get("models") or ()) for worker in self.gateway.registry
            )
            adapter = model.partition(":")[2] or (
                model if is_listed and model not in bases else None
            )
        salts = (fields.get(name) for name in ("cache_salt", "extra_key"))
        salt, extra = (salt if isinstance(salt, str) else None for salt in salts)
        return adapter if isinstance(adapter, str) else None, salt, extra

    # ---- tokenizers ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the tokenizer that the command line names."""
        folder = self.options.tokenizer_path or self.options.model_path
        if folder is not None:
            await self.add(folder, folder, self.options.chat_template)

    async def add(self, name: str, folder: str, chat_template: str | None) -> None:
        """Read a tokenizer in a thread. ConfigError, CheckpointError: it cannot be used."""
        make = load("radixlm.router.gateway_tokenizer:GatewayTokenizer")
        wanted = Wanted("tokenizer", "--tokenizer-path")
        folder = str(await asyncio.to_thread(locate_model, folder, wanted))
        self.by_name[name] = await asyncio.to_thread(
            make, name, folder, chat_template, self.options
        )
        log.info("tokenizer %s read from %s", name, folder)

    def on_worker(self, event: Event, worker: Worker) -> None:
        """Read the tokenizer of a worker on this machine, where a policy asks for tokens."""
        name, folder = worker.model_id or worker.url, worker.facts.get("tokenizer_path")
        pools = self.gateway.dispatcher.pools
        if event == "left" or name in self._tried or not isinstance(folder, str):
            return
        if self.options.disable_tokenizer_autoload:
            return
        if self.by_name and not self.options.enable_igw:
            return
        if pools.of(worker).wants_prompt:
            self._tried.add(name)
            self.gateway.spawn(self._add_quietly(name, folder))

    async def _add_quietly(self, name: str, folder: str) -> None:
        try:
            await self.add(name, folder, self.options.chat_template)
        except RadixError as error:
            log.warning("prompts are routed by their text: %s; see --tokenizer-path", error)

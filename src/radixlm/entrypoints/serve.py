"""``radixlm serve``: read the options, then start the server. --help needs no more than config."""

import gc

from radixlm.base.lazy import load
from radixlm.config.parser import parse
from radixlm.config.server_config import ServerConfig
from radixlm.engine.process import kill_prestarted, prestart_engines


def main(argv: list[str]) -> int:
    """Serve until a signal; the exit status."""
    return serve(*parse(argv, prog="radixlm serve", takes_model=True))


def serve(config: ServerConfig, given: frozenset[str]) -> int:
    """Serve with these options, of which the user gave ``given``; the exit status."""
    if config.parallel.node_rank:
        return int(load("radixlm.entrypoints.node:run")(config, given))
    gc.disable()  # imports leave little garbage; the server turns it on again
    try:
        if not config.serve.engine_in_process:
            prestart_engines(config.parallel.num_replicas)
        run = load("radixlm.entrypoints.http.server:run")
        return int(run(config, given))
    finally:
        kill_prestarted()  # of a server that has not come to use them
        gc.enable()

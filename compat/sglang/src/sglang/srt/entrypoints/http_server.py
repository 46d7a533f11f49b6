"""``launch_server``."""

from __future__ import annotations

from radixlm import ServerArgs
from radixlm.config.server_config import ServerConfig
from radixlm.entrypoints.serve import serve


def launch_server(server_args: ServerArgs) -> int:
    """Serve with these options until a signal; the exit status."""
    given = server_args.given()
    return serve(ServerConfig.from_kwargs(**given), frozenset(given))

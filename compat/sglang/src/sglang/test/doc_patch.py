"""What notebooks import to start a server."""

from sglang.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]

"""Parts of `bench/cpu_peers.py`, which compares this server with other engines."""

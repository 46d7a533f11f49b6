"""Parts of ``bench/cpu_peers.py``: our server beside other engines, on the same model and work."""

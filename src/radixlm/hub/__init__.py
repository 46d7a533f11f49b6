"""Models by name: found in the cache of this machine, else downloaded from a hub."""

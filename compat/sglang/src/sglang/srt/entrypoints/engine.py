"""``Engine``."""

from radixlm import Engine as Engine

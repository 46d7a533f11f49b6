"""``ServerArgs``."""

from radixlm import ServerArgs as ServerArgs

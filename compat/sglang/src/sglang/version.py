"""The version."""

from radixlm import __version__ as __version__

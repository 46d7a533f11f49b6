"""``SamplingParams``."""

from radixlm import SamplingParams as SamplingParams

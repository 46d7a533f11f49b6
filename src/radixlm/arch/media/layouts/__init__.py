"""Checkpoint layouts (``radixlm.arch.media.layout``): one file a family of checkpoints whose config
keys, tensor names or processor are not those of a Hugging Face class."""

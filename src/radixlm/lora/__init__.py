"""LoRA adapters (arXiv:2106.09685) in the format of PEFT: read, checked, and placed in a model."""

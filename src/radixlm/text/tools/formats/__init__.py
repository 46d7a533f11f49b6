"""Tool-call formats, one per file; ``radixlm.text.tools.registry`` names them."""

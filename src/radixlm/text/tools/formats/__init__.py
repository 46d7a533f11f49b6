"""Call formats, one a file; ``radixlm.text.tools.registry`` names them."""

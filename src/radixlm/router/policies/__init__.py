"""Which worker a request goes to."""

"""What requests and steps went through, for the page at /ui and for traces."""

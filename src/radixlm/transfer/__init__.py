"""KV pages between servers: the receiver asks and reads, nobody writes into its memory."""

"""The gateway: many servers behind one address (`radixlm router`)."""

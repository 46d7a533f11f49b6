"""Which waiting request is next, and who gives way to it: policies, fair share, priorities."""

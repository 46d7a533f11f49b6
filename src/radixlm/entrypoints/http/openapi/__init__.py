"""The OpenAPI document and docs/api.md, made from the routes and their request models."""

"""Weights from elsewhere: byte ranges of web servers, object stores and running instances."""

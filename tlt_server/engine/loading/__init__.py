"""Tensors read and held against a schema before anything that serves is touched."""

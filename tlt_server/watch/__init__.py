"""Seeing a server, or a fleet of them, from outside: a page for browsers, and `tlt-server top` for terminals."""

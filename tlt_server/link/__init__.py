"""Follows a drafter trainer for a server: a process of its own, between wire/server.py and the server's public HTTP
routes, so that what takes time (receiving, hashing, writing) holds no lock that decoding waits for."""

"""Follows a drafter trainer for a server: a process of its own, between wire/ and the server's public HTTP routes.

    scheduler, HTTP process ◀── HTTP ── bridge.py ── pipe ── wire/receiver.py ── ZMQ ──▶ drafter trainer

So what takes time (receiving, hashing, writing) holds no lock that decoding waits for; a drafter comes in by the one
route that is there for all; and several tokenizer workers or replicas make no difference. `tlt-server serve --trainer`
starts the link and starts it anew when it dies (keeper.py); it ends when the server does, however that ends.
"""

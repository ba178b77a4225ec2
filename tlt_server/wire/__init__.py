"""What a rollout server and a drafter trainer say to each other (messages.py), over which sockets (sockets.py), and the
two ends: server.py, trainer.py. All state of a link is in a server's `Hello`, said again every second, and a drafter is
fetched by who wants it, from the trainer or another server, chunk by chunk, each known by its sha256: what is lost,
doubled or late does no harm."""

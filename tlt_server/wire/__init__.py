"""The links between processes: what is said on them (messages.py), the sockets (sockets.py), how a drafter crosses.

On the control link the trainer binds a ROUTER (sender.py) and every server connects a DEALER (receiver.py). It may be
cut at any moment: a server's whole state is in its `Hello`, which it repeats every second, and a drafter is fetched by
the receiver, chunk by chunk, each known by its sha256. So a message that is lost, doubled or late does no harm.
"""

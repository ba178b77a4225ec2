"""SIGINT and SIGTERM end a trainer between two steps; one that does not get so far in time ends at once."""

import logging
import os
import signal
import socket
import threading
import time

log = logging.getLogger(__name__)

WITHIN_S = 15.0
"""Seconds, of which the last checkpoint takes most."""


def ended_by_signals(over: threading.Event, within_s: float = WITHIN_S) -> None:
    """Sets the event at such a signal. For the main thread, whose Python may not run while it waits for something: so
    the interpreter tells a thread, too, which ends the process like a kill, for which checkpoints are made."""
    told, tells = socket.socketpair()
    tells.setblocking(False)
    threading.Thread(target=_end, args=(told, tells, within_s), name="ending", daemon=True).start()
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())


def _end(told: socket.socket, tells: socket.socket, within_s: float) -> None:
    """tells: kept open as long as the thread lives."""
    with told, tells:
        told.recv(1)
        time.sleep(within_s)
        log.error("the trainer was told to end, and has not within %g s: it does now", within_s)
        os._exit(1)

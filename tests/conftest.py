"""Shared by all tests: transformers imports wherever torch does, no property fails because the machine is busy, and
what tests start ends by Ctrl-C."""

import signal

from hypothesis import settings

from tlt_server.torchvision import mend_torchvision

settings.register_profile("tlt", deadline=None)
settings.load_profile("tlt")
mend_torchvision()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

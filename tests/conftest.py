"""Shared by all tests: transformers imports wherever torch does, and no property fails because the machine is busy."""

from hypothesis import settings

from tlt_server.torchvision import mend_torchvision

settings.register_profile("tlt", deadline=None)
settings.load_profile("tlt")
mend_torchvision()

"""Shared by all tests: transformers imports wherever torch does."""

from tlt_server.torchvision import mend_torchvision

mend_torchvision()

"""Which arm decodes the next step: pure Python, no clock, no SGLang. An engine talks to selector.py."""

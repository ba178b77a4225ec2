"""Which arm decodes the next step: pure Python, no clock, no SGLang. The engine chooses through selector.py."""

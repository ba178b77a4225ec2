"""The CPU engine: what SGLang lacks on a machine without a GPU."""

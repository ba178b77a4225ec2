"""tlt-server: a rollout server for RL training of reasoning models, on SGLang with lossless speculative decoding."""

__version__ = "0.1.0"

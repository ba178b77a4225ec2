"""Weights while they serve: updates of the target, drafters that are exchanged, the watchdog, memory offload."""

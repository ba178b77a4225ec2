"""Requests inside a scheduler: checked when they come, and answered when they are aborted, held or fail."""

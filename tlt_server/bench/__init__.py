"""`tlt-server bench`: what speculation is worth on a running server, with its own model, drafter and prompts."""

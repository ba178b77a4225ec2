"""Training steps: networks, losses, packs, and their spread over processes."""

"""Training steps: losses, packs, and their spread over processes."""

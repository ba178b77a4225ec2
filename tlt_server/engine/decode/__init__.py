"""One decode step, top to bottom in worker.py: drafting, verification, plain steps, and which arm is next."""

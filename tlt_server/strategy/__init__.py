"""Which strategy decodes the next batch: BEG-MAB, pure. `selector.py` is the door; the engine uses nothing else."""

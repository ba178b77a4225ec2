"""Which strategy decodes the next batch: BEG-MAB, and the bandit by default. Pure: neither torch nor SGLang."""

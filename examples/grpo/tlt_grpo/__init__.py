"""GRPO against a rollout server, small enough to read in one sitting. Begin with `train.py`."""

"""What one step does to the policy. Begin with `policy.py`."""

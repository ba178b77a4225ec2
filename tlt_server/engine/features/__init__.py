"""The feature tap: hidden states on their way from decode steps to the drafter trainer."""

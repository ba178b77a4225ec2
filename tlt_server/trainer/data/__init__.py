"""What a drafter learns from: features off the wire, buffered by target, and prompts replayed."""

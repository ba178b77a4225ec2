"""What is sampled after a token: filters, noise, and the one choice that plain and speculative decoding make."""

"""What the trainer raises on purpose; what the server refuses, or does not answer, are tlt_client's errors."""


class GrpoError(Exception):
    """A setting or a model that cannot be used as given; the message names the value and the remedy."""

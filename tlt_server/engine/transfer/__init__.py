"""vLLM's weight transfer: a trainer broadcasts a target to the server's ranks, which receive it apart from decoding."""

"""What of ours is in ASGI's scope of a request, beside what the servers of the HTTP protocol put there."""

PARSED = "tlt_body"
"""The body as an object, for SGLang's `Request.json()` and for what it has no field for."""
TOLD = "tlt_told"
"""What is told at the top of an answer, in its `meta_info`: of routes whose answers do not hold each sample's own."""

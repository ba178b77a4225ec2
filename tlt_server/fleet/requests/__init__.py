"""The path of requests for responses: which member gets one, on to it and back, once more where that is safe."""

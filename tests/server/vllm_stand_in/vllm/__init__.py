"""Stands for vLLM in a trainer's process: TRL asks for its version, and for what its clients import of it."""

__version__ = "0.31.0"


class _Absent:
    """What trainers import for the engine in their own process, which no test has."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the stand-in has no engine")


LLM = RequestOutput = SamplingParams = _Absent

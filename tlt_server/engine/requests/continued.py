"""Requests that go on from tokens that others sampled: where their prompt ends and their response begins.

What a request says of that travels in its `custom_params`, which upstream hands to the scheduler as they are.
"""

from typing import Any

GENERATED = "generated_tokens"


def generated_tokens(params: Any) -> int:
    """How many of the last input ids were sampled before. params: upstream's `SamplingParams`."""
    count: int = (params.custom_params or {}).get(GENERATED, 0)
    return count


def prompt_length(req: Any) -> int:
    """Tokens of the prompt alone, by a scheduler's request: what follows them in its input ids was sampled before."""
    return len(req.origin_input_ids) - generated_tokens(req.sampling_params)

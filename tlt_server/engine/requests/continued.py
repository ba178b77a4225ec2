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
    # upstream replaces the input of a request that is refused here
    return max(len(req.origin_input_ids) - generated_tokens(req.sampling_params), 0)


def read_generated(req: Any) -> None:
    """A request's grammar, as yet at its beginning, reads what was sampled before; where it cannot, the request ends
    with status 400."""
    count = generated_tokens(req.sampling_params)
    if not count or req.grammar is None or req.to_finish is not None:
        return
    try:
        for token in req.origin_input_ids[-count:]:
            if req.grammar.is_terminated():
                raise ValueError("it is at its end")
            req.grammar.accept_token(token)
    except ValueError as error:
        req.set_finish_with_abort(f"{GENERATED}: the request's grammar does not allow these {count}: {error}")

"""Requests that go on from tokens that others sampled: where their prompt ends and their response begins.

What a request says of that travels in its `custom_params`, which upstream hands to the scheduler as they are.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def with_generated(req: Any, new_tokens: int) -> Iterator[None]:
    """Inside, a request's output begins with what was sampled before, as far as its stop strings and patterns look back
    from the `new_tokens` of a step."""
    params = req.sampling_params
    reach = max(params.stop_str_max_len, params.stop_regex_max_len) + new_tokens
    count = min(generated_tokens(params), reach)
    if count == 0 or len(req.output_ids) > reach or not (params.stop_strs or params.stop_regex_strs):
        yield
        return
    req.output_ids[:0] = array("q", req.origin_input_ids[-count:])
    # override: of one request, as long as its end is judged
    params.max_new_tokens += count
    yield
    del req.output_ids[:count]
    # override: as it was
    params.max_new_tokens -= count
    if req.finished_len is not None:
        req.finished_len -= count
    if (limit := req.finished_reason) is not None and hasattr(limit, "length"):
        # override: likewise
        limit.length -= count


def begin_grammar(req: Any) -> None:
    """A request's grammar, as yet at its beginning, reads what was sampled before. Where it cannot, or nothing may come
    next, the request ends with status 400."""
    if req.grammar is None or req.to_finish is not None:
        return
    count = generated_tokens(req.sampling_params)
    try:
        for token in req.origin_input_ids[-count:] if count else ():
            if req.grammar.is_terminated():
                raise ValueError("it is at its end")
            req.grammar.accept_token(token)
    except ValueError as error:
        req.set_finish_with_abort(f"{GENERATED}: the request's grammar does not allow these {count}: {error}")
        return
    if _forbids_all(req.grammar, req.vocab_size):
        # a schema that refers to nothing but itself does
        req.set_finish_with_abort("the request's grammar allows no token here: no text is of its form")


def _forbids_all(grammar: Any, vocabulary: int) -> bool:
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    grammar = getattr(grammar, "grammar", grammar)  # that of what comes after reasoning
    if not isinstance(grammar, XGrammarGrammar) or grammar.is_terminated():
        return False
    mask = xgrammar.allocate_token_bitmask(1, vocabulary)
    grammar.fill_vocab_mask(mask, 0)
    return not mask.any()

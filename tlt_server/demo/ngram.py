"""What drafting without a model would reach: prompt-lookup n-grams, the yardstick of the demo's drafter."""

from collections.abc import Iterable, Sequence

Rollout = tuple[Sequence[int], Sequence[int]]


def prompt_lookup_accept_length(rollouts: Iterable[Rollout], max_ngram: int = 3, num_draft_tokens: int = 3) -> float:
    """Mean tokens per target pass, the bonus token counted, had `rollouts` been drafted by looking them up.

    A rollout is (prompt tokens, output tokens), the first output token coming from the prefill. Each pass takes the
    longest suffix of at most `max_ngram` tokens that occurs earlier in prompt + output, and proposes the
    `num_draft_tokens` tokens after its latest earlier occurrence; they are accepted while they equal what was sampled.
    Raises ValueError when no rollout has a second output token. Source: prompt lookup decoding (Saxena, 2023).
    """
    tokens = passes = 0
    for prompt, output in rollouts:
        tokens += max(0, len(output) - 1)
        passes += _count_passes([*prompt, *output], len(prompt) + 1, max_ngram, num_draft_tokens)
    if passes == 0:
        raise ValueError("no rollout is longer than one token: nothing was drafted; sample longer outputs")
    return tokens / passes


def _count_passes(tokens: list[int], known: int, max_ngram: int, num_draft_tokens: int) -> int:
    latest: dict[tuple[int, ...], int] = {}
    indexed = passes = 0
    while known < len(tokens):
        for end in range(indexed + 1, known):
            for n in range(1, min(max_ngram, end) + 1):
                latest[tuple(tokens[end - n : end])] = end
        indexed = known - 1
        draft = _look_up(tokens, known, latest, max_ngram)[:num_draft_tokens]
        accepted = 0
        while accepted < len(draft) and tokens[known : known + accepted + 1] == draft[: accepted + 1]:
            accepted += 1
        known += accepted + 1
        passes += 1
    return passes


def _look_up(tokens: list[int], known: int, latest: dict[tuple[int, ...], int], max_ngram: int) -> list[int]:
    for n in range(min(max_ngram, known), 0, -1):
        end = latest.get(tuple(tokens[known - n : known]))
        if end is not None:
            return tokens[end:known]
    return []

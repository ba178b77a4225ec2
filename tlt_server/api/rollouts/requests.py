"""What a rollout request may ask for under speculation, and what its answer says about it.

Lossless is the contract: with speculation on, a request is sampled exactly as with speculation off. What verification
cannot do exactly is refused with a 400 that says so. Neutral values pass, since trainers send them all the time.
"""

from collections.abc import Sequence
from typing import Any


def check_request(request: Any, params: Any, manager: Any) -> None:
    """Refuses what would end the server, and what speculation would not sample exactly.

    Args:
        request: upstream's `GenerateReqInput`, for one response.
        params: its `SamplingParams`, normalised.
        manager: upstream's `TokenizerManager`.

    Raises:
        ValueError: which upstream answers with status 400.
    """
    _refuse_unknown_tokens(request.input_ids, manager.model_config.vocab_size)
    if manager.server_args.speculative_algorithm is not None:
        _refuse_inexact(request, params)


def _refuse_unknown_tokens(tokens: Sequence[int] | None, vocab_size: int) -> None:
    """Upstream lets any token id through to the embedding, whose error ends the scheduler, and with it the server."""
    unknown = [token for token in tokens or () if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(f"input_ids holds {unknown[0]}: the model's vocabulary is 0 to {vocab_size - 1}")


def _refuse_inexact(request: Any, params: Any) -> None:
    asked = [
        f"{name}={value}"
        for name, value, neutral in (
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("presence_penalty", params.presence_penalty, 0.0),
            ("repetition_penalty", params.repetition_penalty, 1.0),
        )
        if value != neutral
    ]
    if getattr(request, "custom_logit_processor", None):
        asked.append("custom_logit_processor")
    if getattr(request, "return_sampling_mask", None):
        asked.append("return_sampling_mask")
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: cannot be honoured exactly while speculation is on. "
            "Leave it out, or send the request to a server started with --no-speculation."
        )


def add_counts_to_meta_info(meta_info: dict[str, Any]) -> None:
    """Completes the speculation counts in a response's meta_info, in place, under old and new names.

    A tree verifies `num_draft_tokens` tokens of which one, the root, was sampled before: that many less one were
    proposed. Each pass may have had another arm; their mean comes as `spec_cap_length` (engine/decode/crediting.py).
    Upstream 0.5.17 has renamed its keys; RL trainers read the names of before.
    """
    passes = meta_info.get("spec_verify_ct")
    if not passes:
        return
    accepted = meta_info["spec_num_correct_drafts"]
    proposed = round(passes * meta_info.pop("spec_cap_length"))
    meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = proposed
    meta_info["spec_draft_token_num"] = proposed
    meta_info["spec_accept_token_num"] = accepted
    meta_info["spec_accept_rate"] = accepted / proposed
    meta_info["spec_accept_length"] = 1 + accepted / passes

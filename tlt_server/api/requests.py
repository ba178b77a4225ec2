"""What a rollout request may ask for under speculation, and what its answer says about it.

Lossless is the contract: with speculation on, a request is sampled exactly as with speculation off. What verification
cannot do exactly is refused with a 400 that says so. Neutral values pass, since trainers send them all the time.
"""

from typing import Any


def refuse_inexact(request: Any, params: Any, server_args: Any) -> None:
    """Refuses what speculation would not sample exactly.

    Args:
        request: upstream's `GenerateReqInput`.
        params: its `SamplingParams`, normalised.
        server_args: upstream's; no speculation, no refusal.

    Raises:
        ValueError: which upstream answers with status 400.
    """
    if server_args.speculative_algorithm is None:
        return
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


def add_counts_to_meta_info(meta_info: dict[str, Any], server_args: Any) -> None:
    """Completes the speculation counts in a response's meta_info, in place, under old and new names.

    A tree verifies `num_draft_tokens` tokens of which one, the root, was sampled before: that many less one were
    proposed in each verify pass. Upstream 0.5.17 has renamed its keys; RL trainers read the names of before.
    """
    passes = meta_info.get("spec_verify_ct")
    if not passes:
        return
    accepted = meta_info["spec_num_correct_drafts"]
    proposed = passes * (server_args.speculative_num_draft_tokens - 1)
    meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = proposed
    meta_info["spec_draft_token_num"] = proposed
    meta_info["spec_accept_token_num"] = accepted
    meta_info["spec_accept_rate"] = accepted / proposed
    meta_info["spec_accept_length"] = 1 + accepted / passes

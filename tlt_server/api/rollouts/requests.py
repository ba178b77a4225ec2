"""What a rollout request may ask for under speculation, and what its answer says about it.

Lossless is the contract: with speculation on, a request is sampled exactly as with speculation off. What verification
cannot do exactly is refused with a 400 that says so.
"""

from typing import Any


def check_request(request: Any, _params: Any, manager: Any) -> None:
    """Refuses what speculation would not sample exactly.

    Token ids are held against the vocabulary by the gate, and by the scheduler's intake.

    request: upstream's `GenerateReqInput`, for one response.
    Raises ValueError: which upstream answers with status 400.
    """
    if manager.server_args.speculative_algorithm is None:
        return
    asked = [name for name in ("custom_logit_processor", "return_sampling_mask") if getattr(request, name, None)]
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

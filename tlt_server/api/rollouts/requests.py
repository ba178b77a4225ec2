"""What a rollout request may ask for under speculation, and what its answer says about it.

Lossless is the contract: with speculation on, a request is sampled exactly as with speculation off. What verification
cannot do exactly is refused with a 400 that says so.
"""

from typing import Any

from tlt_server.api.rollouts.scope import PARSED
from tlt_server.api.rollouts.seeds import give_seeds
from tlt_server.engine.decode.verify import counts_late
from tlt_server.engine.requests.continued import GENERATED, generated_tokens
from tlt_server.engine.requests.remembered import HISTORY, KEY, NAMESPACE
from tlt_server.engine.sampling.penalties import NEUTRAL


def settle_request(obj: Any, raw: Any) -> None:
    """Writes into a request's sampling parameters what is not upstream's: seeds, what was generated before, and what
    it asks of the history.

    obj: upstream's, of one prompt or several, normalised. raw: the HTTP request; None: it is the server's own.
    """
    give_seeds(obj, raw)
    prompts = [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]
    _remember(prompts, raw)
    generated = None if raw is None else raw.scope.get(PARSED, {}).get(GENERATED)
    if generated is None:
        return
    counts = generated if isinstance(generated, list) else [generated] * len(prompts)
    for prompt, count in zip(prompts, counts, strict=True):
        _continue(prompt, count or 0)


def _remember(prompts: list[Any], raw: Any) -> None:
    """Has a request's prompts carry what it asks of the history."""
    parsed = {} if raw is None else raw.scope.get(PARSED, {})
    mode, namespace = parsed.get(HISTORY), parsed.get(NAMESPACE)
    if mode is None and namespace is None:
        return
    for obj in prompts:
        custom = obj.sampling_params.get("custom_params") or {}
        asked = [mode or "both", namespace or ""]
        obj.sampling_params = obj.sampling_params | {"custom_params": custom | {KEY: asked}}


def _continue(obj: Any, generated: int) -> None:
    """Upstream counts `min_new_tokens` from the end of the input; here it counts from where the response began."""
    params = obj.sampling_params
    custom = (params.get("custom_params") or {}) | {GENERATED: generated}
    least = max((params.get("min_new_tokens") or 0) - generated, 0)
    obj.sampling_params = params | {"custom_params": custom, "min_new_tokens": least}


def check_request(request: Any, params: Any, manager: Any) -> None:
    """Refuses what would not be sampled exactly: under speculation; penalties of a response that goes on, where
    SGLang counts.

    Token ids are held against the vocabulary by the gate, and by the scheduler's intake.

    request: upstream's `GenerateReqInput`, for one response; `params` are normalised.
    Raises ValueError: which upstream answers with status 400.
    """
    if counts_late(manager.server_args):
        asked = [f"{name}={getattr(params, name)}" for name in NEUTRAL if getattr(params, name) != NEUTRAL[name]]
        if asked and generated_tokens(params):
            raise ValueError(f"{', '.join(asked)}: would not count {GENERATED} under this server's flags")
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
    proposed = round(passes * meta_info.pop("spec_cap_length", 0))  # history may have proposed nothing
    meta_info["spec_num_proposed_drafts"] = meta_info["spec_proposed_drafts"] = proposed
    meta_info["spec_draft_token_num"] = proposed
    meta_info["spec_accept_token_num"] = accepted
    meta_info["spec_accept_rate"] = accepted / proposed if proposed else 0.0
    meta_info["spec_accept_length"] = 1 + accepted / passes

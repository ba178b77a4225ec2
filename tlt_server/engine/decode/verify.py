"""What the fork changes in verification: logits as plain decoding has them after each node, and where responses end.

Upstream's `eagle_sample` judges penalties and min_new_tokens once for the whole tree, and does not always find the
token that ends a response among several. What is taken after a node says engine/sampling/choice.py.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch

from tlt_server.engine.requests.continued import with_generated
from tlt_server.engine.sampling.filters import apply_min_new_tokens, stop_token_table
from tlt_server.engine.sampling.penalties import Penalties, asks


def penalises(_batch: Any) -> bool:
    """Whether what upstream calls penalties, min_new_tokens among them, is applied here, to a `ScheduleBatch`. Its own
    penalizers take a vocabulary's width of each request several times over, in every step, and count late."""
    from sglang.srt.runtime_context import get_server_args

    return not counts_late(get_server_args())


def counts_late(server_args: Any) -> bool:
    """Whether penalties are upstream's: where prefills, with which counting begins, run elsewhere or beside decoding,
    and where a pass is not of a next token."""
    elsewhere = server_args.disaggregation_mode != "null" or server_args.enable_pdmux
    return bool(elsewhere or server_args.dllm_algorithm)


def prepare_nodes(output: Any, verify_input: Any, batch: Any) -> torch.Tensor:
    """What plain decoding does to logits before bias and grammar, after each node: [bs * num_draft_tokens, vocab].

    output: upstream's `LogitsProcessorOutput`, which has them from here on. verify_input: its `EagleVerifyInput`.
    batch: its `ScheduleBatch`, whose `sampling_info` holds the `Penalties`.
    """
    from tlt_server.engine.sampling.logits import as_read

    output.next_token_logits = logits = as_read(output.next_token_logits, batch)
    batch.sampling_info.penalties.apply(logits, batch, verify_input)
    forbid_early_stop(logits, verify_input.positions, batch.reqs)
    return logits


def prepare_last(batch: Any, penalties: Penalties) -> None:
    """Has upstream do the same to the logits after the last token of each request of a `ScheduleBatch`: of prompts,
    some of which may end with a part of the response; or of plain steps, where upstream runs them."""
    info, reqs = batch.sampling_info, batch.reqs
    # override: of one pass
    info.acc_additive_penalties = info.acc_scaling_penalties = None
    if not any(asks(req) or len(req.output_ids) < req.sampling_params.min_new_tokens for req in reqs):
        return
    additive, scaling = penalties.terms(batch)
    forbid_early_stop(additive, batch.seq_lens - 1, reqs)
    # override: as above
    info.acc_additive_penalties, info.acc_scaling_penalties = additive, scaling


def settle_greed(batch: Any) -> None:
    """Lets the logprobs of a `ScheduleBatch` be of each request's own temperature: where all of a batch are greedy,
    upstream's are of temperature 1, and a neighbour would change them."""
    info = batch.sampling_info
    if batch.reqs and info.is_all_greedy:
        # override: of a copy for one step, or to take the longer way for a while
        info.is_all_greedy = all(req.sampling_params.temperature == 1 for req in batch.reqs)


def forbid_early_stop(logits: torch.Tensor, positions: torch.Tensor, reqs: list[Any]) -> None:
    """Sets the logits of stop tokens, [bs * num_draft_tokens, vocab], to -inf, in place, at nodes that lie before a
    request's min_new_tokens. positions: [bs * num_draft_tokens] int, of each node in its sequence."""
    if not any(len(req.output_ids) < req.sampling_params.min_new_tokens for req in reqs):
        return  # under overlap output_ids lags behind, so this never leaves too early
    prompts = torch.tensor([len(req.origin_input_ids) for req in reqs])
    least = torch.tensor([req.sampling_params.min_new_tokens for req in reqs])
    table = stop_token_table([stop_tokens(req) for req in reqs])
    prompts, least, table = (each.to(logits.device, non_blocking=True) for each in (prompts, least, table))
    output_lens = positions.view(len(reqs), -1) + 1 - prompts[:, None]
    apply_min_new_tokens(logits, output_lens, least, table)


def settle_end(req: Any, new_tokens: int) -> None:
    """Ends a response at the token of a step at which plain decoding ends it, were it aborted or not.

    Upstream takes an abort before it looks for an end, the limit before what ended the response before it, and a stop
    string before a stop token in front of it: what the step gave beyond the end is returned then.

    req: upstream's, with the `new_tokens` of the step appended.
    """
    abort = req.to_finish
    if req.finished() or (abort is not None and abort.status_code == HTTPStatus.BAD_REQUEST):
        req.judge_end(new_tokens)  # a bad request's prompt was replaced: its token is no answer
        return
    req.to_finish = None
    given = req.output_ids[len(req.output_ids) - new_tokens :]
    with with_generated(req, new_tokens):
        req.judge_end(new_tokens)
        if new_tokens > 1 and (req.finished() or req.sampling_params.stop_regex_strs):  # a pattern may match a part
            _judge_one_by_one(req, given)
    if not req.finished() and ends_grammar(req):
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

        req.finished_reason = FINISH_MATCHED_TOKEN(matched=req.output_ids[-1])
    if not req.finished():
        req.finished_reason = abort
    elif req.finished_len is not None:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def ends_grammar(req: Any) -> bool:
    """Whether a request's newest token ends its grammar: the end of sequence, which a grammar allows nowhere else,
    `ignore_eos` or not. After a prefill or a plain step upstream has the grammar read it later, and samples one more
    token, freely."""
    return req.grammar is not None and req.output_ids[-1] in (req.eos_token_ids or {req.tokenizer.eos_token_id})


def _judge_one_by_one(req: Any, given: Sequence[int]) -> None:
    req.finished_reason = req.finished_len = None
    grammar, req.grammar = req.grammar, None  # it has read the whole step, and may end with the last token only
    del req.output_ids[len(req.output_ids) - len(given) :]
    for position, token in enumerate(given, start=1):
        req.output_ids.append(token)
        if position == len(given):
            req.grammar = grammar
        req.judge_end(1)
        if req.finished():
            req.finished_len = len(req.output_ids) if req.finished_len is None else req.finished_len
            req.output_ids.extend(given[position:])
            break
    req.grammar = grammar


def stop_tokens(req: Any) -> set[int]:
    """The tokens that min_new_tokens holds back: exactly those that upstream's plain decoding does."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
    return stops if req.tokenizer.eos_token_id is None else stops | {req.tokenizer.eos_token_id}

"""The token after each row of logits: one function for a prefill, plain steps and the nodes of chains and trees."""

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler

from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.engine.sampling.noise import gumbel


def choose(logits: torch.Tensor, info: Any, positions: torch.Tensor) -> torch.Tensor:
    """The token after each row, by its request's temperature, filters and noise: [rows] int64.

    Args:
        logits: [bs * nodes, vocab], penalties, bias and masks applied; left as they are.
        info: upstream's `SamplingBatchInfo` of the bs requests, with `sampling_seed`.
        positions: [bs * nodes] int64, of each row's own token, after which one is chosen.

    Of nothing but -inf and NaN it is token 0, which ends a request whose grammar forbids all: by itself, as upstream
    has it, for no request may end the others.
    """
    if info.is_all_greedy:
        return logits.argmax(-1)
    nodes = len(logits) // len(info.sampling_seed)
    if logits.is_cuda:
        from tlt_server.engine.sampling.kernels import noisy_argmax

        if not _filters(info):
            return noisy_argmax(logits, info.sampling_seed, positions + 1, nodes, info.temperatures)
        return noisy_argmax(_allowed(logits, info, nodes), info.sampling_seed, positions + 1, nodes)
    noise = gumbel(_each(info.sampling_seed, nodes), positions + 1, logits.shape[1])
    scores = noise.add_(_allowed(logits, info, nodes))
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)


def _filters(info: Any) -> dict[str, torch.Tensor]:
    """What any request of the batch asks of `filter_probs`: [bs] each."""
    asked = {
        "top_ks": info.need_top_k_sampling,
        "top_ps": info.need_top_p_sampling,
        "min_ps": info.need_min_p_sampling,
    }
    return {name: getattr(info, name) for name, needed in asked.items() if needed}


def _allowed(logits: torch.Tensor, info: Any, nodes: int) -> torch.Tensor:
    """Logits over the temperature, -inf where a filter forbids: [bs * nodes, vocab] float32."""
    scaled = logits / _each(info.temperatures, nodes)
    if filters := _filters(info):
        kept = filter_probs(scaled.softmax(-1), **{name: _each(values, nodes) for name, values in filters.items()})
        scaled.masked_fill_(kept == 0, float("-inf"))
    return scaled


def _each(values: torch.Tensor, nodes: int) -> torch.Tensor:
    """[bs, ...] to [bs * nodes, ...]: every request's, at each of its nodes."""
    return values if nodes == 1 else values.repeat_interleave(nodes, dim=0)


def choose_nodes(logits: torch.Tensor, info: Any, positions: torch.Tensor) -> torch.Tensor:
    """`choose` after each node of a batch's trees, the same on all ranks."""
    tokens = choose(logits, info, positions)
    group = get_tp_group()
    if group.world_size > 1 and not info.is_all_greedy:  # ranks may round differently: one of them decides
        group.broadcast(tokens, src=0)
    return tokens


def compile_choice() -> None:
    """A GPU's kernels, now, or all requests wait a second with the first one."""
    from tlt_server.engine.sampling.kernels import BLOCK, noisy_argmax

    row = torch.zeros(1, 3 * BLOCK, device="cuda")  # several blocks, and a multiple of 16, as most vocabularies
    one, seed = torch.ones(1, 1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        noisy_argmax(row.to(dtype), seed, seed, 1, one)
    noisy_argmax(row, seed, seed, 1)


class OneSampler(Sampler):
    """Upstream's sampler, by `choose`."""

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            compile_choice()

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """As upstream's: [bs] int32, logprobs and sampling masks left in `logits_output`."""
        if sampling_info.is_all_greedy:
            tokens: torch.Tensor = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            return tokens
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        tokens = choose_nodes(logits, sampling_info, positions).to(torch.int32)
        if any(sampling_info.return_sampling_masks or ()):
            probs = (logits / sampling_info.temperatures).softmax(-1)
            masks = self._compute_sampling_mask_from_probs(probs, sampling_info)
            self._attach_sampling_mask_to_output(logits_output, sampling_info, tokens, masks)
        if return_logprob:
            scaled = logits if envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get() else logits / sampling_info.temperatures
            self.output_logprob_processor.compute_logprobs(
                scaled.log_softmax(-1), top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

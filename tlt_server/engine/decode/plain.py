"""Decode steps of the target alone, within upstream's EAGLE worker: what *off* is.

A pass of one token a request and a draw, as a server without a drafter runs them. Nothing here waits for the GPU: a
step is launched while the one before it runs, so nothing is read back, nothing that Python holds is copied over, and
what is the same in every step is made once.

A drafter does not run. Its places in the pool are zeroed, so that it attends to nothing there rather than to what an
earlier request left; what it needs to catch up is kept for a while (missed.py).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from tlt_server.engine.decode.missed import Missed
from tlt_server.engine.decode.undrafted import no_proposal
from tlt_server.engine.decode.verify import forbid_early_stop
from tlt_server.engine.graphs.attention import attend_decodes
from tlt_server.engine.graphs.capture import changed
from tlt_server.engine.graphs.workspace import trim
from tlt_server.engine.sampling.logits import as_read


class PlainSteps:
    """The plain decode steps of an EAGLE worker whose pools and attention backends are ready. Its model runner is a
    copy: same weights, pools and sampler; an attention backend and CUDA graphs of its own."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.runner = runner = copy.copy(worker.target_worker.model_runner)
        # override: of a copy: a model runner reads in many places whether its server speculates
        runner.spec_algorithm = SpeculativeAlgorithm.NONE
        if worker.draft_worker.drafts:
            # override: of a copy: its passes, and their CUDA graphs, hand out all hidden states
            runner.server_args = changed(runner.server_args, return_hidden_states_mode="full")
        runner.attn_backend = runner._get_attention_backend()  # with the workspace that all passes take turns in
        trim(runner.attn_backend)
        attend_decodes(runner.attn_backend)
        # override: it keeps the runner that it was made for
        runner.eager_runner = EagerRunner(runner)
        runner.init_decode_cuda_graph()
        most = worker.req_to_token_pool.size
        self._one_each = torch.ones(most, dtype=torch.int32)  # where it is read: on the CPU
        self._proposal = _empty_proposal(worker, most)
        self.missed: Missed | None = Missed(worker) if worker.draft_worker.drafts else None

    @property
    def in_graphs(self) -> int:
        """The largest batch that has a CUDA graph; 0: there is none."""
        graphs = self.runner.decode_cuda_graph_runner
        return 0 if graphs is None else int(graphs.max_bs)

    def step(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        """Decodes one token of each request, and returns what verification returns: [bs] tokens, one accepted for each.

        batch: upstream's `ScheduleBatch`; its `spec_info` is the draft input that the step before left. on_publish: is
        told the new lengths, [bs], as soon as they are known. grammar_barrier: called before grammars are read.
        """
        new_seq_lens = batch.seq_lens + 1
        if on_publish is not None:  # before the pass: the next step is prepared once the lengths are known
            on_publish(new_seq_lens)
        forward_batch = self._forward_batch(batch, new_seq_lens)
        tree = GrammarTree.from_linear_chain(batch.input_ids[:, None]) if batch.has_grammar else None
        output = self.runner.forward(forward_batch)
        mask = tree and build_grammar_vocab_mask(
            reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=batch.device, barrier=grammar_barrier
        )
        tokens = self._drawn(batch, forward_batch, output.logits_output, mask)
        if self.missed is not None:
            leave_out(self._worker.draft_worker.draft_runner.token_to_kv_pool, batch.out_cache_loc)
            self.missed.keep(batch, forward_batch.positions, output.logits_output.hidden_states, tokens)
        bs = len(batch.reqs)
        return GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=output.can_run_graph,
            speculative_num_draft_tokens=1,
            next_draft_input=EagleDraftInput(
                bonus_tokens=tokens, **{name: each[:bs] for name, each in self._proposal.items()}
            ),
            accept_lens=self._one_each[:bs],
            new_seq_lens=new_seq_lens,
            routed_experts_output=output.routed_experts_output,
            extra_keep_alive_refs=[forward_batch],
        )

    def _forward_batch(self, batch: Any, new_seq_lens: torch.Tensor) -> ForwardBatch:
        """Lengths of a `ScheduleBatch` under speculation are those before the step; a decode pass counts its token."""
        pool = self._worker.req_to_token_pool.req_to_token
        batch.input_ids = batch.spec_info.bonus_tokens
        batch.out_cache_loc = pool[batch.req_pool_indices, batch.seq_lens].to(torch.int64)
        batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
        batch.seq_lens, batch.seq_lens_sum = new_seq_lens, None
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        return ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)

    def _drawn(self, batch: Any, forward_batch: ForwardBatch, output: Any, mask: Any) -> torch.Tensor:
        """The next tokens, [bs] int; their logprobs are left in `output`, as verification leaves those of a root."""
        output.next_token_logits = logits = as_read(output.next_token_logits, batch)
        info = forward_batch.sampling_info
        info.penalties.apply(logits, batch)
        forbid_early_stop(logits, forward_batch.positions, batch.reqs)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias)
        if mask is not None:
            mask.apply(logits)
        tokens: torch.Tensor = self.runner.sampler(
            output,
            info,
            forward_batch.return_logprob,
            forward_batch.top_logprobs_nums,
            forward_batch.token_ids_logprobs,
            forward_batch.positions,
        )
        if forward_batch.return_logprob:
            output.next_token_logprobs = output.next_token_logprobs[:, None]
        info.penalties.count(batch, tokens)
        return tokens


def leave_out(pool: Any, places: torch.Tensor) -> None:
    """Zeroes keys and values at `places`, [bs] int64, of all layers of a pool. By `index_fill_`: assigning a number by
    index copies it to the GPU, and waits until it is there, which is after the pass before."""
    for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
        pool.get_key_buffer(layer).index_fill_(0, places, 0)
        pool.get_value_buffer(layer).index_fill_(0, places, 0)


def _empty_proposal(worker: Any, most: int) -> dict[str, torch.Tensor]:
    """What a step leaves in place of the drafter's proposal: of up to `most` requests, in the widest arm's shape."""
    nothing = no_proposal(most, worker.device, worker.topk)
    if not worker.draft_worker.drafts:
        return nothing
    hidden_size, dtype = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
    if hidden_size is not None:
        nothing["hidden_states"] = torch.zeros(most, hidden_size, dtype=dtype, device=worker.device)
    return nothing

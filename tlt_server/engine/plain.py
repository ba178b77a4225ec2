"""Decode steps of the target alone, within upstream's EAGLE worker: what *off* is.

A pass of one token a request, as a server without a drafter runs it, with CUDA graphs of its own, and a draw by the law
of verification at a tree of one node: by the one law that every step follows.

The drafter does not run. It has no keys and values for what is decoded meanwhile; its places in the pool are zeroed, so
that it attends to nothing there rather than to what an earlier request left. The first step after *off* begins with an
empty proposal, of which nothing is accepted; its draft-extend is where drafting goes on from.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.eager_runner import EagerRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import eagle_sample
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    record_stream_each,
    record_stream_for_v2_verify,
)

from tlt_server.config import ServerConfig


class PlainSteps:
    """The plain decode steps of an EAGLE worker whose pools and attention backends are ready.

    Upstream's model runner reads in many places whether it is one of a speculative server. This one is a copy that is
    not: same weights, same pools; an attention backend and CUDA graphs of its own.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.runner = runner = copy.copy(worker.target_worker.model_runner)
        runner.spec_algorithm = SpeculativeAlgorithm.NONE
        if ServerConfig.from_environment().taps:
            runner.server_args = _with_states(runner.server_args)
        runner.attn_backend = runner._get_attention_backend()  # with the workspace that all passes take turns in
        runner.eager_runner = EagerRunner(runner)
        runner.init_decode_cuda_graph()

    def step(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        """Decodes one token of each request.

        Args:
            batch: upstream's `ScheduleBatch`; its `spec_info` is the draft input that the step before left.
            on_publish: to be told the new lengths, [bs], as soon as they are known.
            grammar_barrier: to be called before grammars are read, if any.

        Returns:
            What verification returns: [bs] tokens, one accepted for each request.
        """
        new_seq_lens = batch.seq_lens + 1
        if on_publish is not None:  # before the pass: the next step is prepared once the lengths are known
            on_publish(new_seq_lens)
        stream = torch.get_device_module(batch.device).current_stream()
        node = _one_node(batch)
        record_stream_for_v2_verify(batch, node, stream)
        forward_batch = self._forward_batch(batch, node)
        record_stream_each((batch.input_ids, batch.out_cache_loc), stream)
        tree = _grammar_tree(node) if batch.has_grammar else None
        output = self.runner.forward(forward_batch)
        mask = tree and build_grammar_vocab_mask(
            reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=batch.device, barrier=grammar_barrier
        )
        tokens, accept_lens, accept_index = eagle_sample(node, batch, output.logits_output, mask)
        if batch.return_logprob:
            compute_spec_v2_logprobs(batch, output.logits_output, tokens, accept_index, 0)
        result = GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=output.can_run_graph,
            speculative_num_draft_tokens=1,
            next_draft_input=EagleDraftInput(bonus_tokens=tokens),
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            extra_keep_alive_refs=[forward_batch],
        )
        self._leave_out(batch.out_cache_loc)
        self._worker._stub_skipped_draft_extend(batch, result)
        return result

    def _forward_batch(self, batch: Any, node: EagleVerifyInput) -> ForwardBatch:
        """Lengths of a `ScheduleBatch` under speculation are those before the step; a decode pass counts its token."""
        pool = self._worker.req_to_token_pool.req_to_token
        batch.input_ids = node.draft_token
        batch.out_cache_loc = pool[batch.req_pool_indices, batch.seq_lens].to(torch.int64)
        batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None
        forward_batch = ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        forward_batch.positions = node.positions
        forward_batch.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            forward_batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
        return forward_batch

    def _leave_out(self, places: torch.Tensor) -> None:
        """Zeroes the drafter's keys and values at `places`, [bs] int64 slots of the pool."""
        pool = self._worker.draft_worker.draft_runner.token_to_kv_pool
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            pool.get_key_buffer(layer)[places] = 0
            pool.get_value_buffer(layer)[places] = 0


def _with_states(server_args: Any) -> Any:
    """Settings of a runner whose passes, and their CUDA graphs, hand out all hidden states."""
    view = copy.copy(server_args)
    object.__setattr__(view, "return_hidden_states_mode", "full")  # assigning is refused once a server has started
    return view


def _one_node(batch: Any) -> EagleVerifyInput:
    """A tree that is its root: the token sampled last."""
    bs, device = len(batch.seq_lens), batch.device
    nothing = torch.full((bs, 1), -1, dtype=torch.long, device=device)
    return EagleVerifyInput(
        draft_token=batch.spec_info.bonus_tokens,
        custom_mask=None,
        positions=batch.seq_lens.to(torch.int64),
        retrieve_index=torch.arange(bs, dtype=torch.long, device=device)[:, None],
        retrieve_next_token=nothing,
        retrieve_next_sibling=nothing,
        retrieve_cum_len=None,
        spec_steps=0,
        topk=1,
        draft_token_num=1,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def _grammar_tree(node: EagleVerifyInput) -> GrammarTree:
    return GrammarTree.from_device(node.retrieve_next_token, node.retrieve_next_sibling, node.draft_token[:, None])

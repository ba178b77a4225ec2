"""Attention in plain torch, for a machine without a GPU: one gather and one dense product for a batch, trees included.

Upstream's `torch_native` walks over the requests in every layer and knows neither tree verification nor multi-step
drafting. Here places and mask of a pass are laid out once, in `init_forward_metadata`. Every decode-like pass is a
request's committed prefix, padded to the longest of the batch, then a few new tokens:

    decode          one new token, which sees itself
    verify          `num_draft_tokens` nodes; a node sees its ancestors (EAGLE-2's tree mask, arXiv 2406.16858)
    draft, step i   `topk` branches; branch j sees its own i + 1 newest tokens
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from tlt_server.engine.cpu.alike import attend_alike, is_batch_invariant_mode_enabled

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Layout(NamedTuple):
    """Where a batch's keys lie, and who sees whom.

    slots: [bs, n_kv] int64, places in the KV pool; padding points at slot 0, which no request owns.
    mask:  [bs, 1, n_q, n_kv] bool, True where a query sees a key.
    """

    slots: torch.Tensor
    mask: torch.Tensor


def lay_out(req_to_token: torch.Tensor, prefix_lens: torch.Tensor, visible: torch.Tensor) -> Layout:
    """The layout of committed prefixes followed by new tokens.

    req_to_token: [bs, row] int, each request's slots by position.
    prefix_lens: [bs] int, committed tokens; the new tokens' slots follow directly behind them.
    visible: [bs, n_q, n_new] bool, which new tokens a query sees; every query sees the whole prefix.
    """
    device, n_new = req_to_token.device, visible.shape[2]
    longest = int(prefix_lens.max())
    in_prefix = torch.arange(longest, device=device) < prefix_lens[:, None]
    new = prefix_lens[:, None].long() + torch.arange(n_new, device=device)
    prefix_slots = req_to_token[:, :longest].long() * in_prefix
    slots = torch.cat([prefix_slots, req_to_token.gather(1, new).long()], dim=1)
    prefix_mask = in_prefix[:, None, :].expand(-1, visible.shape[1], -1)
    return Layout(slots, torch.cat([prefix_mask, visible], dim=2)[:, None])


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """Dense attention of a batch over a KV pool: query [bs, n_q, heads, head_dim], keys and values [pool, kv_heads,
    head_dim], the pool's buffers of one layer, to [bs, n_q, heads, value_dim]."""
    q = query.transpose(1, 2)
    k = keys[layout.slots].transpose(1, 2).to(query.dtype)
    v = values[layout.slots].transpose(1, 2).to(query.dtype)
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, layout.mask, scale=scale, enable_gqa=grouped).transpose(1, 2)


class CpuAttnBackend(TorchNativeAttnBackend):
    """Prefill, decode, verify and draft-extend. Keeps upstream's name `torch_native`, which SGLang looks for."""

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        super().init_forward_metadata(forward_batch)
        self.layouts: list[Layout] = []
        if forward_batch.batch_size == 0:
            return
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            nodes = forward_batch.spec_info.draft_token_num
            tree = forward_batch.spec_info.custom_mask.view(-1)[: len(rows) * nodes * nodes]
            self.layouts = [lay_out(rows, forward_batch.seq_lens, tree.view(len(rows), nodes, nodes).bool())]
        elif mode.is_decode():
            visible = torch.ones(len(rows), 1, 1, dtype=torch.bool, device=rows.device)
            self.layouts = [lay_out(rows, forward_batch.seq_lens - 1, visible)]
        else:
            self.layouts = self._extend_layouts(forward_batch, rows)

    @staticmethod
    def _extend_layouts(forward_batch: "ForwardBatch", rows: torch.Tensor) -> list[Layout]:
        """One layout for all requests where they extend by the same length (draft-extend), else one each (prefill)."""
        lens = forward_batch.extend_seq_lens.tolist()
        prefix = forward_batch.extend_prefix_lens
        causal = torch.ones(max(lens), max(lens), dtype=torch.bool, device=rows.device).tril()
        if len(set(lens)) == 1:
            return [lay_out(rows, prefix, causal.expand(len(rows), -1, -1))]
        return [lay_out(rows[i : i + 1], prefix[i : i + 1], causal[None, :n, :n]) for i, n in enumerate(lens)]

    def forward_extend(self, q: Any, k: Any, v: Any, layer: "RadixAttention", *rest: Any, **named: Any) -> torch.Tensor:
        forward = self._forward if _is_plain_causal(layer) else super().forward_extend
        return forward(q, k, v, layer, *rest, **named)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: "RadixAttention", *rest: Any, **named: Any) -> torch.Tensor:
        forward = self._forward if _is_plain_causal(layer) else super().forward_decode
        return forward(q, k, v, layer, *rest, **named)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        packed = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        attended = attend_alike if is_batch_invariant_mode_enabled() else attend
        outputs, start = [], 0
        for layout in self.layouts:
            bs, _, n_q, _ = layout.mask.shape
            query = packed[start : start + bs * n_q].view(bs, n_q, *packed.shape[1:])
            outputs.append(attended(query, keys, values, layout, layer.scaling).reshape(bs * n_q, -1))
            start += bs * n_q
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else packed.flatten(1)


class CpuDraftStep(CpuAttnBackend):
    """Attention of one draft step; its layout is set by `CpuDraftAttnBackend` for all steps together."""

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """The container has laid the step out: the step's own call must not undo it."""


class CpuDraftAttnBackend:
    """What upstream calls a multi-step draft backend: one attention backend for each drafter pass of a step.

    Branch j of request b writes its step-i token at position `seq_lens[b] + j * num_steps + i`. model_runner: the
    drafter's. topk: branches. num_steps: draft depth; the first token comes from draft-extend, so there is a pass less.
    """

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self.attn_backends = [CpuDraftStep(model_runner) for _ in range(num_steps - 1)]
        self.topk, self.num_steps = topk, num_steps

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        backend = self.attn_backends[0]
        rows = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]
        branch = torch.arange(self.topk, device=rows.device)
        place = torch.arange(self.topk * self.num_steps, device=rows.device)
        own = place // self.num_steps == branch[:, None]
        for step, backend in enumerate(self.attn_backends):
            visible = own & (place % self.num_steps <= step)
            TorchNativeAttnBackend.init_forward_metadata(backend, forward_batch)
            # override: upstream plans nothing for a tree, which the passes of one step read
            backend.layouts = [lay_out(rows, forward_batch.seq_lens, visible.expand(len(rows), -1, -1))]


def _is_plain_causal(layer: "RadixAttention") -> bool:
    """Cross, encoder-only and sliding-window attention stay upstream's: they never meet speculation here."""
    window = layer.sliding_window_size
    windowed = window is not None and window > -1
    return not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY or windowed)

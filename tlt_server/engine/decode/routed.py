"""The experts that each token was routed to, under speculation.

SGLang keeps a row for each place in the KV cache: what the last pass that read a token there chose. Verification writes
rows of all its nodes, so a chain's are right, and what was not accepted is written over by what follows. Two things it
leaves out: a pass of verification reads more tokens than its buffer has rows for; and of a tree the keys and values of
the accepted path are moved to other places, and the rows stay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.state_capturer.base import BaseDeviceCache, TopkCaptureOutput
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor


@dataclass
class MovedRows:
    """A pass's rows, and where they go after: upstream's `TopkCaptureOutput`, by what is asked of it. into, out_of:
    places in the KV cache, [n] int64."""

    rows: TopkCaptureOutput
    into: Tensor
    out_of: Tensor

    def map_device_tensors(self, copy: Callable[[Tensor], Tensor]) -> None:
        self.rows.map_device_tensors(copy)
        self.into, self.out_of = copy(self.into), copy(self.out_of)

    def finalize(self) -> None:
        """Once all is on the CPU."""
        self.rows.finalize()
        move(self.rows.host_cache.buffer, self.into, self.out_of)


def move(buffer: Tensor, into: Tensor, out_of: Tensor) -> None:
    """Rows [places, layers, experts of a token] of a buffer, all read before one is written."""
    buffer[into] = buffer[out_of]


class RoutedExperts:
    """Of one rank. Made once pools are there, before anything is captured: CUDA graphs write to the buffer.

    capturer: upstream's. pool: the target's, of keys and values. tokens: that a pass of verification reads, at most.
    """

    def __init__(self, capturer: Any, pool: Any, tokens: int) -> None:
        self._host = capturer.host_cache.buffer
        self._moves: tuple[Tensor, Tensor] | None = None
        held = capturer.device_cache
        rows, layers, experts = held.buffer.shape
        if tokens > rows:
            # override: upstream reckons with a token of each request; more would end the server
            capturer.device_cache = BaseDeviceCache(tokens, layers, experts, held.buffer.device, held.name)
        move_keys_and_values = pool.move_kv_cache

        def noted(into: Tensor, out_of: Tensor) -> None:
            move_keys_and_values(into, out_of)
            self._moves = into, out_of

        # override: nothing else says which nodes of a tree were accepted
        pool.move_kv_cache = noted

    def follow(self, result: Any) -> None:
        """After a verification: the rows of what it accepted go where its keys and values went. result: upstream's
        `GenerationBatchResult`."""
        moves, self._moves = self._moves, None
        if moves is None:
            return
        if result.routed_experts_output is None:  # without overlap the pass has written its rows
            move(self._host, moves[0].cpu(), moves[1].cpu())
        else:
            result.routed_experts_output = MovedRows(result.routed_experts_output, *moves)


def routed_experts(worker: Any) -> RoutedExperts | None:
    """Those of an `EagleWorker`, if its server keeps any."""
    if (capturer := get_global_experts_capturer()) is None:
        return None
    largest = worker.target_worker.model_runner.max_running_requests
    tokens = largest * max(arm.num_draft_tokens for arm in worker.all_arms)
    return RoutedExperts(capturer, worker.token_to_kv_pool_allocator.get_kvcache(), tokens)

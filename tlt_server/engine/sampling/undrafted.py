"""What sampling on a server without a drafter is to have in common with plain steps under speculation.

Upstream's own penalizers, of min_new_tokens too, count on the host, which under overlap knows a token one step late.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tlt_server.engine.decode.verify import prepare_last, settle_greed
from tlt_server.engine.sampling.penalties import Penalties


class Undrafted:
    """What all passes of one rank's `TpModelWorker` go through, from here on."""

    def __init__(self, tp_worker: Any) -> None:
        runner = tp_worker.model_runner
        slots = runner.req_to_token_pool.req_to_token.shape[0]
        self._penalties = Penalties(slots, runner.model_config.vocab_size, runner.device)
        self._forward = tp_worker.forward_batch_generation
        # override: the worker has no place for it between a pass and its sampling
        tp_worker.forward_batch_generation = self._step

    def _step(self, batch: Any, *args: Any, **named: Any) -> Any:
        """As upstream's."""
        if batch is None or not batch.reqs:
            return self._forward(batch, *args, **named)
        settle_greed(batch)
        if batch.forward_mode.is_extend():
            decoding = len(batch.decoding_reqs or ())  # behind the others, where a batch is mixed
            places = slice(len(batch.reqs) - decoding)
            self._penalties.begin(
                SimpleNamespace(reqs=batch.reqs[places], req_pool_indices=batch.req_pool_indices[places])
            )
        prepare_last(batch, self._penalties)
        # the scheduler changes its batch meanwhile, where a grammar has sampling wait
        sampled = SimpleNamespace(reqs=list(batch.reqs), req_pool_indices=batch.req_pool_indices)
        return self._counted(self._forward(batch, *args, **named), sampled)

    def _counted(self, result: Any, sampled: Any) -> Any:
        """A result, its tokens counted as soon as they are there."""
        if result.delay_sample_func is not None:
            # upstream calls it later in the step
            result.delay_sample_func = self._later(result.delay_sample_func, sampled)
        elif result.next_token_ids is not None:
            self._penalties.count(sampled, result.next_token_ids)
        return result

    def _later(self, sample: Callable[[], Any], sampled: Any) -> Callable[[], Any]:
        def counting() -> Any:
            result = sample()
            self._penalties.count(sampled, result.next_token_ids)
            return result

        return counting

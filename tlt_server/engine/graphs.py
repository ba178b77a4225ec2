"""Attention backends and CUDA graphs of arms, captured for the batch sizes that each of them may be chosen at.

SGLang's constructors read an arm from settings that hold for the whole server. While they run, those settings are the
arm's: on the model runners a copy of `ServerArgs`, in the runtime context the three values themselves. Afterwards all
is as before. Without graphs, as on a CPU, everything else happens alike.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from tlt_server.config import Arm

logger = logging.getLogger(__name__)

MOST_VERIFIED = 512
"""Tokens that an arm among several verifies in one pass, at most: beyond, a pass is bound by arithmetic, and costs more
than it can bring. On an H200 chain 3,1,4 gains 1.1 at 128 requests, and loses at 256 (benchmarks/README.md)."""


def sizes_of(arm: Arm, sizes: Sequence[int]) -> list[int]:
    """Of a server's ascending batch sizes, those that an arm among several gets graphs for; at least one."""
    return [size for size in sizes if size * arm.num_draft_tokens <= MOST_VERIFIED] or list(sizes[:1])


@cache
def capture_stream() -> Any:
    """The stream that all graphs of this process are captured on."""
    return torch.get_device_module().Stream()


class Pass(NamedTuple):
    """One of the passes of a step: an attention backend, and a runner of CUDA graphs; None: there is none."""

    attention: Any
    graphs: Any


class Graphs:
    """Makes the passes of a worker's arms.

    worker: `EagleWorker`. Its pools and SGLang's own attention backends are there, and no graph of a decode step.
    sizes: batch sizes that each arm is captured at, ascending; empty ones: there are no graphs here.
    """

    def __init__(self, worker: Any, arms: Sequence[Arm]) -> None:
        self._draft, self._target = worker.draft_worker, worker.target_worker.model_runner
        self._runners = (self._target, self._draft.draft_runner)
        self._every = _captured_sizes(self._target)
        self.sizes: Mapping[Arm, Sequence[int]] = {
            arm: sizes_of(arm, self._every) if len(arms) > 1 else self._every for arm in arms
        }

    def withhold(self) -> None:
        """Until `release`, SGLang captures no decode graphs: its own would be of the widest arm, at every size."""
        if not self._every:
            return
        self._withheld = _graph_config()
        decode = replace(self._withheld.decode, backend="disabled")
        _override(cuda_graph_config=replace(self._withheld, decode=decode))
        rows = max(self._every[-1], *(sizes[-1] * arm.num_draft_tokens for arm, sizes in self.sizes.items()))
        for runner in self._runners:  # of the logits that all graphs share; SGLang reckons with its own
            runner.max_decode_logits_rows = lambda: rows

    def release(self) -> None:
        """Graphs can be captured again."""
        if self._every:
            _override(cuda_graph_config=self._withheld)

    def captured(self, largest: int) -> dict[Arm, int]:
        """The largest batch size of each arm; `largest`, the server's, where nothing limits it but that."""
        limited = len(self.sizes) > 1 and bool(self._every)
        return {arm: sizes[-1] if limited else largest for arm, sizes in self.sizes.items()}

    def verification(self, arm: Arm) -> Pass:
        """The target's pass over as many tokens as the arm verifies."""
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        with self._settings(arm, self._sizes(lambda other: other.num_draft_tokens == arm.num_draft_tokens)):
            attention = self._target._get_attention_backend()
            return self._captured(
                "verification",
                arm.num_draft_tokens,
                attention,
                lambda: DecodeCudaGraphRunner(
                    self._target,
                    attn_backend=attention,
                    speculative_num_steps=arm.num_steps,
                    speculative_num_draft_tokens=arm.num_draft_tokens,
                ),
            )

    def drafting(self, arm: Arm) -> Pass:
        """The drafter's passes of one step, all in one graph; the drafter is set up for the arm. None for one step."""
        from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

        draft = self._draft
        with self._settings(arm, self.sizes[arm]), _drafting(draft):
            attention = self._backends(arm).create_decode_backend()
            draft.draft_attn_backend = draft.draft_runner.draft_attn_backend = attention
            if attention is None:
                return Pass(None, None)
            return self._captured(f"drafting {arm}", arm.topk, attention, lambda: EAGLEDraftCudaGraphRunner(draft))

    def draft_extend(self, arm: Arm) -> Pass:
        """The drafter's pass over what can have been accepted, a path through the tree: `num_steps + 1` tokens."""
        from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

        draft, rows = self._draft, arm.num_steps + 1
        sizes = self._sizes(lambda other: other.num_steps == arm.num_steps)
        with self._settings(arm, sizes, verified=rows), _drafting(draft):
            attention = self._backends(arm).create_draft_extend_backend()
            if not _can_extend_in_graph(attention):
                return Pass(attention, None)
            return self._captured(
                "draft-extend",
                rows,
                attention,
                lambda: EAGLEDraftExtendCudaGraphRunner(draft, draft_extend_attn_backend=attention),
            )

    def _sizes(self, shares: Callable[[Arm], bool]) -> Sequence[int]:
        """The sizes of the arms that share a pass: those of the arm that has most."""
        return max((sizes for arm, sizes in self.sizes.items() if shares(arm)), key=len)

    def _backends(self, arm: Arm) -> Any:
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        return DraftBackendFactory(self._draft.server_args, self._draft.draft_runner, arm.topk, arm.num_steps)

    def _captured(self, what: str, width: int, attention: Any, capture: Callable[[], Any]) -> Pass:
        """A pass over `width` tokens of each request."""
        if not self._every:
            return Pass(attention, None)
        before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
        graphs = capture()
        used, took = (before - torch.cuda.mem_get_info()[0]) / 2**30, time.perf_counter() - began
        if graphs.captured_req_width != width:  # SGLang would pass it over in each step, and run slowly
            raise RuntimeError(f"{what}: captured {graphs.captured_req_width} tokens a request, and not {width}")
        bs = list(graphs.capture_bs)
        logger.info("captured %s of %d tokens at batches %s: %.2f GiB, %.1f s", what, width, bs, used, took)
        return Pass(attention, graphs)

    @contextmanager
    def _settings(self, arm: Arm, sizes: Sequence[int], verified: int | None = None) -> Iterator[None]:
        """Within, SGLang's settings are those of a server with this arm alone, and graphs of these sizes."""
        from sglang.srt.runtime_context import get_spec

        values = {
            "speculative_num_steps": arm.num_steps,
            "speculative_eagle_topk": arm.topk,
            "speculative_num_draft_tokens": verified or arm.num_draft_tokens,
        }
        before = [runner.server_args for runner in self._runners]
        bag = {name: getattr(get_spec(), name) for name in values}
        _override(**values)
        for runner in self._runners:
            runner.server_args = _changed(runner.server_args, values, sizes)
        try:
            yield
        finally:
            _override(**bag)
            for runner, server_args in zip(self._runners, before, strict=True):
                runner.server_args = server_args


def _changed(server_args: Any, values: Mapping[str, int], sizes: Sequence[int]) -> Any:
    """A copy of `ServerArgs`, which lets nobody assign its fields."""
    changed = copy(server_args)
    graphs = {}
    if sizes:
        config = server_args.cuda_graph_config
        decode = replace(config.decode, bs=list(sizes), max_bs=sizes[-1])
        graphs = {"cuda_graph_config": replace(config, decode=decode)}
    for name, value in {**values, **graphs}.items():
        object.__setattr__(changed, name, value)
    return changed


def _override(**values: Any) -> None:
    from sglang.srt.runtime_context import get_context

    get_context().override("tlt-server", **values)


def _graph_config() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config


def _captured_sizes(target: Any) -> Sequence[int]:
    """Batch sizes that SGLang would capture decode graphs at, ascending; empty where it captures none."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    config = _graph_config()
    if target.device != "cuda" or config is None or config.decode.backend == "disabled":
        return ()
    sizes: Sequence[int] = get_batch_sizes_to_capture(target)[0]
    return sizes


def _can_extend_in_graph(attention: Any) -> bool:
    """Whether SGLang captures draft-extend with this backend, of those that our verification is tested with."""
    return any(each.__name__ in ("FlashInferAttnBackend", "TritonAttnBackend") for each in type(attention).__mro__)


@contextmanager
def _drafting(draft: Any) -> Iterator[None]:
    """What SGLang wraps around all that its draft worker initialises."""
    from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context

    runner = draft.draft_runner
    moe, moe_a2a = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
    with draft.draft_tp_context(runner.tp_group), moe, moe_a2a:
        yield

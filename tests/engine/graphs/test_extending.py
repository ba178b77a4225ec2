"""What is captured of draft-extend reads no row that is not there, whatever arm had the buffers before."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.input_buffers import share_input_buffer
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

from tlt_server.engine.decode.drafting import _last_accepted
from tlt_server.engine.graphs.extending import DraftExtendGraphs

BATCH = 4


def test_an_arm_is_captured_on_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives graphs of one batch size the same buffers, as the first arm left them."""
    read = []

    def captured(runner: DraftExtendGraphs, size: int) -> None:
        rows = size * runner.captured_req_width
        accepted = runner.buffers.num_accept_tokens[:size]
        batch = SimpleNamespace(
            input_ids=torch.zeros(rows), batch_size=size, spec_info=SimpleNamespace(num_accept_tokens=accepted)
        )
        read.append((rows, _last_accepted(batch).tolist()))

    monkeypatch.setattr(EAGLEDraftExtendCudaGraphRunner, "capture_one_shape", captured)
    for width in (4, 2):
        runner = DraftExtendGraphs.__new__(DraftExtendGraphs)
        runner.captured_req_width = width
        made = share_input_buffer("of_this_test", torch.full((BATCH,), width, dtype=torch.int32))
        runner.buffers = SimpleNamespace(num_accept_tokens=made)
        runner.capture_one_shape(BATCH)
    assert read == [(16, [3, 7, 11, 15]), (8, [1, 3, 5, 7])]

"""Draft-extend reads no row that is not there, whatever arm had SGLang's buffers before, or has had them since."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.input_buffers import share_input_buffer
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

from tlt_server.engine.decode.drafting import _last_accepted
from tlt_server.engine.graphs.extending import DraftExtendGraphs

BATCH = 4


def replayed(runner: EAGLEDraftExtendCudaGraphRunner) -> list[int]:
    """The rows that its graph of the largest batch reads, as its buffers are now."""
    batch = SimpleNamespace(
        input_ids=torch.zeros(BATCH * runner.captured_req_width),
        batch_size=BATCH,
        spec_info=SimpleNamespace(num_accept_tokens=runner.buffers.num_accept_tokens[:BATCH]),
    )
    return _last_accepted(batch).tolist()


@pytest.mark.parametrize("widths", [(4, 2), (2, 4)])
def test_an_arm_reads_rows_of_its_own(widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives graphs of one batch size the same buffers, and fills them when the first runner is made."""
    expected = {4: [3, 7, 11, 15], 2: [1, 3, 5, 7]}
    captured = []
    monkeypatch.setattr(EAGLEDraftExtendCudaGraphRunner, "capture", lambda runner: captured.append(replayed(runner)))
    runners = []
    for width in widths:
        runner = DraftExtendGraphs.__new__(DraftExtendGraphs)
        runner.captured_req_width = width
        made = share_input_buffer(f"of_this_test_{widths}", torch.full((BATCH,), width, dtype=torch.int32))
        runner.buffers = SimpleNamespace(num_accept_tokens=made)
        runner.capture()
        runners.append(runner)
    assert captured == [expected[width] for width in widths]
    assert [replayed(runner) for runner in runners] == captured

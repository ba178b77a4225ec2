"""CUDA graphs of draft-extend, which give logits without the noise: what it is added to is known when they have run."""

from typing import Any

import torch
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner


class DraftExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """Upstream's, of a draft worker that adds noise."""

    def capture(self) -> None:
        """Upstream's runners share their buffers: what another arm accepted there may be more than this one has rows,
        when it is captured and when its graphs are timed."""
        shared = self.buffers.num_accept_tokens
        # override: one of its own
        self.buffers.num_accept_tokens = torch.full_like(shared, self.captured_req_width)
        super().capture()

    def execute(self, forward_batch: Any) -> Any:
        output = super().execute(forward_batch)
        self.eagle_worker.make_noisy(output, forward_batch)
        return output

"""CUDA graphs of draft-extend, which give logits without the noise: what it is added to is known when they have run."""

from typing import Any

from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner


class DraftExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """Upstream's, of a draft worker that adds noise."""

    def execute(self, forward_batch: Any) -> Any:
        output = super().execute(forward_batch)
        self.eagle_worker.make_noisy(output, forward_batch)
        return output

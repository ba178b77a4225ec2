"""CUDA graphs of draft-extend, which give logits without the noise: what it is added to is known when they have run."""

from typing import Any

from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner


class DraftExtendGraphs(EAGLEDraftExtendCudaGraphRunner):
    """Upstream's, of a draft worker that adds noise."""

    def capture_one_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's runners share their buffers, and fill them when they are made: by now these may be another arm's,
        which accepts more than there are rows of this one."""
        self.buffers.num_accept_tokens.fill_(self.captured_req_width)
        return super().capture_one_shape(*args, **kwargs)

    def execute(self, forward_batch: Any) -> Any:
        output = super().execute(forward_batch)
        self.eagle_worker.make_noisy(output, forward_batch)
        return output

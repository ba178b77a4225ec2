"""Every point at which patched SGLang calls us, and all that we replace in its processes. No logic lives here.

The patches in patches/ reach this module as `sglang.tlt`. It is None, and every seam is inert, unless the process
belongs to a server that `tlt-server serve` started.

    replaced or supplied              why
    sys.modules["sgl_kernel"]         it has no CPU build; the CPU engine's kernels stand in for it
    torchvision's nms and qnms        a torchvision built for CUDA does not register them beside a CPU build of torch
    attention backend "torch_native"  upstream's knows neither tree masks nor multi-step drafting
    the scheduler's weight updater    upstream's loads a target into the drafter too, and fails by ending the server
    load_weights of the target        upstream's takes tensors that do not fit (engine/admission.py)
"""

from tlt_server.api.requests import add_counts_to_meta_info, check_request
from tlt_server.engine.cpu import (
    apply_token_bitmask,
    create_attention_backend,
    draft_backends,
    draft_extend_backends,
    install,
)
from tlt_server.engine.verify import filter_target_probs, forbid_early_stop, sample_filtered
from tlt_server.metrics import count_verified

__all__ = [
    "add_counts_to_meta_info",
    "apply_token_bitmask",
    "check_request",
    "count_verified",
    "create_attention_backend",
    "create_router",
    "draft_backends",
    "draft_extend_backends",
    "filter_target_probs",
    "forbid_early_stop",
    "install",
    "sample_filtered",
    "weight_updater_class",
]


def create_router() -> object:
    """Our HTTP routes; imported only in the process that serves HTTP."""
    from tlt_server.api.app import router

    return router


def weight_updater_class() -> type:
    """What a scheduler updates weights with; imported only in the scheduler's process."""
    from tlt_server.engine.routing import WeightRouter

    return WeightRouter

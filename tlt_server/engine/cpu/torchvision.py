"""Makes `import torchvision` work where its compiled half does not load; transformers and SGLang import it at start.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its extension does not load, silently, and its Python
half then fails on the operators that the extension would have defined. Nothing that tlt-server runs calls them.
"""

from functools import cache
from importlib import util
from pathlib import Path

import torch


@cache
def mend_torchvision() -> torch.library.Library | None:
    """Defines the missing operators. Does nothing where torchvision is absent, or matches torch. Returns the library
    that holds them, which lives, as the cache keeps it, as long as the process."""
    spec = util.find_spec("torchvision")
    if spec is None or spec.origin is None or torch.version.cuda:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:  # built for another torch: exactly the case that this function is for
        library = torch.library.Library("torchvision", "DEF")
        # override: a torchvision built for CUDA registers none beside a CPU build of torch, and fails to load
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None

"""Makes `import torchvision` work where its compiled half does not load; transformers and SGLang import it at start.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its extension does not load, silently, and its Python
half then fails on the operators that the extension would have defined. Nothing that tlt-server runs calls them.
"""

from importlib import util
from pathlib import Path

import torch

_library: torch.library.Library | None = None  # operators live as long as their library does


def mend_torchvision() -> None:
    """Defines the missing operators. Does nothing where torchvision is absent, or matches torch."""
    global _library
    spec = util.find_spec("torchvision")
    if spec is None or spec.origin is None or torch.version.cuda or _library:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:  # built for another torch: exactly the case that this function is for
        _library = torch.library.Library("torchvision", "DEF")
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

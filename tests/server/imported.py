"""What `warm.py` has a process import before servers are forked from it: all that `tlt-server serve` imports."""

import os

from tlt_server.config import ServerConfig
from tlt_server.launch import CPU_ENVIRONMENT, importing

os.environ |= CPU_ENVIRONMENT
ServerConfig().to_environment()  # opens the seams, as in a server
with importing():
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import torch

    import tlt_server.cli
torch.set_num_threads(1)  # a fork has no others

__all__ = ["sglang", "tlt_server"]

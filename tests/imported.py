"""What a process imports before `forks.py` forks others from it: what a server and a trainer import, but SGLang's HTTP
server, whose module has its routes by the settings."""

import os
import sys

from tlt_server.config import ServerConfig
from tlt_server.launch import CPU_ENVIRONMENT
from tlt_server.process import importing

os.environ |= CPU_ENVIRONMENT
ServerConfig().to_environment()  # opens the seams, as in a server
with importing():
    import sglang.launch_server
    import sglang.srt.entrypoints.anthropic.serving
    import sglang.srt.entrypoints.engine
    import sglang.srt.entrypoints.ollama.serving
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import torch.distributed.tensor

    import tlt_server.cli
    import tlt_server.trainer.learn.loop
assert "sglang.srt.entrypoints.http_server" not in sys.modules, "its routes are those of no dialect yet"
assert "prometheus_client" not in sys.modules, "SGLang chooses first where its processes' metrics meet"
torch.set_num_threads(1)  # a fork has no others

__all__ = ["sglang", "tlt_server"]

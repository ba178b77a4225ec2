"""What TRL's own client makes of a server, as JSON: it finds its vLLM on the path when it is imported, and so is in a
process of its own.

    python -m tests.server.trl_rollouts URL PROMPTS.json OUT.json

The prompts are a list of lists of token ids.
"""

import json
import sys
from pathlib import Path

from tlt_server.engine.cpu.torchvision import mend_torchvision

mend_torchvision()

from trl.generation.vllm_client import VLLMClient  # noqa: E402

ASK = {"temperature": 0.0, "max_tokens": 12}
CHAT = [[{"role": "user", "content": "What is 3*4?"}], [{"role": "user", "content": "What is 5*6?"}]]


def main(url: str, asked: Path, out: Path) -> None:
    prompts = json.loads(asked.read_text())
    client = VLLMClient(base_url=url, connection_timeout=10)
    generated = client.generate(prompts, n=3, **ASK)
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, generated["completion_ids"][::3], strict=True)]
    told = {
        "model": client.model,
        "generate": generated,
        "top": client.generate(prompts, logprobs=2, **ASK),
        "without": client.generate(prompts, logprobs=None, structured_outputs_regex="[0-9]{3}", max_tokens=8),
        "texts": client.generate(["What is 3*4?\n"], **ASK),
        "chat": client.chat(CHAT, n=2, logprobs=1, **ASK),
        "scored": client.get_sequence_logprobs(sequences, [len(prompt) for prompt in prompts], top_logprobs=4),
    }
    out.write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))

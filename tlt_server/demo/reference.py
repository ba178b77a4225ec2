"""The target by transformers, without any server: what the losslessness check compares with."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tlt_server.demo.lossless import Tokens
from tlt_server.torchvision import mend_torchvision


class Reference:
    """A target and its tokenizer, in float32 on the CPU.

    Args:
        path: the model's folder.
    """

    def __init__(self, path: Path) -> None:
        mend_torchvision()
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def tokens(self, text: str) -> Tokens:
        """A prompt as the server tokenises it."""
        return tuple(self._tokenizer.encode(text))

    @torch.no_grad()
    def logits(self, sequences: Sequence[Tokens]) -> torch.Tensor:
        """The logits after each of n equally long sequences: [n, vocab] float32."""
        output: torch.Tensor = self.model(torch.tensor(sequences), logits_to_keep=1).logits[:, -1]
        return output

    def next_probs(self, sequences: Sequence[Tokens]) -> torch.Tensor:
        """The law at temperature 1 of what follows each of n equally long sequences: [n, vocab]."""
        return self.logits(sequences).softmax(-1)

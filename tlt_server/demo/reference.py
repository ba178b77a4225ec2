"""The target by transformers, without any server: what the losslessness check compares with."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tlt_server.demo.lossless import Tokens
from tlt_server.engine.cpu.torchvision import mend_torchvision

ROWS = 256
"""Sequences in one forward pass: bounds the memory of a large vocabulary's logits."""


class Reference:
    """A target and its tokenizer. dtype: of its weights and sums; logits are float32 in any case."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        mend_torchvision()
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    @cached_property
    def rounded(self) -> "Reference":
        """The same weights in bfloat16."""
        return Reference(self._path, torch.bfloat16, self.model.device.type)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)

    def tokens(self, text: str) -> Tokens:
        """A prompt as the server tokenises it."""
        return tuple(self._tokenizer.encode(text))

    @torch.no_grad()
    def logits(self, sequences: Sequence[Tokens]) -> torch.Tensor:
        """The logits after each of n equally long sequences: [n, vocab] float32."""
        rows = torch.tensor(sequences, device=self.model.device)
        return torch.cat([self.model(part, logits_to_keep=1).logits[:, -1].float() for part in rows.split(ROWS)])

    @torch.no_grad()
    def logits_in_parts(self, sequence: Tokens, size: int) -> torch.Tensor:
        """The logits after a sequence that is read in parts of so many tokens, by a cache: [vocab] float32."""
        rows, past = torch.tensor([sequence], device=self.model.device), None
        for part in rows.split(size, dim=1):
            out = self.model(part, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
        logits: torch.Tensor = out.logits[0, -1].float()
        return logits

    @torch.no_grad()
    def along(self, prompt: Tokens, response: Tokens) -> torch.Tensor:
        """The logits before each token of a response: [length, vocab]."""
        sequence = torch.tensor([(*prompt, *response)], device=self.model.device)
        logits: torch.Tensor = self.model(sequence, logits_to_keep=len(response) + 1).logits[0, :-1]
        return logits

    def next_probs(self, sequences: Sequence[Tokens]) -> torch.Tensor:
        """The law at temperature 1 of what follows each of n equally long sequences: [n, vocab]."""
        return self.logits(sequences).softmax(-1)

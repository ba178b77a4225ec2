"""SpecForge's own trainer of EAGLE-3 drafters, fed with runs of ours: its model and its optimiser, in one process.

SpecForge is none of our dependencies: `pip install --no-deps --target FOLDER specforge==0.2.0`.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.lib.training.recipe import CLIP, DECAY, STEPS, WARMUP
from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.errors import ConfigError
from tlt_server.preflight import read_config
from tlt_server.trainer.learn.chains import Frozen
from tlt_server.trainer.learn.packing import Run

OURS, THEIRS = "layers.0.", "midlayer."
"""How the names of a drafter's one layer begin."""


def check(folder: Path) -> None:
    """Raises ConfigError: SpecForge is not there."""
    if not (folder / "specforge").is_dir():
        raise ConfigError(
            f"--specforge {folder}: no folder specforge in it. Make it with pip install --no-deps --target "
            f"{folder} specforge==0.2.0"
        )


class SpecForge:
    """A drafter that its code trains. It begins with the weights of `drafter`, a folder of ours, and the target's head,
    which is learnt, too, as its own is.

    site: where SpecForge lies. rate: the highest. steps: of training, in all.
    """

    def __init__(self, site: Path, drafter: Path, frozen: Frozen, rate: float, steps: int) -> None:
        theirs = _imported(site)
        vocab, hidden = frozen.head.shape
        self._config = read_config(drafter) | {"draft_vocab_size": vocab, "target_hidden_size": hidden}
        named = {
            name.replace(OURS, THEIRS): each.float() for name, each in load_file(drafter / "model.safetensors").items()
        }
        self._drafter = theirs["draft"].LlamaForCausalLMEagle3(theirs["transformers"].LlamaConfig(**self._config))
        self._drafter = self._drafter.float()
        given = named | {"embed_tokens.weight": frozen.embedding.float(), "lm_head.weight": frozen.head.float()}
        left = self._drafter.load_state_dict(given, strict=False)
        assert not left.unexpected_keys, left
        assert set(left.missing_keys) <= {"t2d", "d2t"}, left
        self._drafter.freeze_embedding()
        self._head = frozen.head.float()
        self._model = theirs["model"].OnlineEagle3Model(self._drafter, length=STEPS, attention_backend="sdpa")
        self._optimiser = theirs["optimizer"].BF16Optimizer(
            self._drafter, lr=rate, max_grad_norm=CLIP, total_steps=steps, warmup_ratio=WARMUP
        )

    def losses(self, runs: Sequence[Run]) -> list[Tensor]:
        """Of each step of a batch of these runs, padded: mean over all entries, of which some do not count."""

        def padded(each: Sequence[Tensor]) -> Tensor:
            return pad_sequence(list(each), batch_first=True)

        counted = [(torch.arange(run.entries) >= max(0, run.prompt - 1 - run.first)).long() for run in runs]
        found: Any = self._model(
            input_ids=padded([run.tokens[1:] for run in runs]),
            attention_mask=padded([torch.ones(run.entries, dtype=torch.long) for run in runs]),
            target=padded([run.finals[1:].float() @ self._head.T for run in runs]),
            loss_mask=padded(counted)[..., None],
            hidden_states=padded([run.states[:-1].float() for run in runs]),
        )
        losses: list[Tensor] = found[0]
        return losses

    def step(self, runs: Sequence[Run]) -> None:
        """One of training."""
        total = sum(DECAY**step * loss for step, loss in enumerate(self.losses(runs)))
        assert isinstance(total, Tensor)
        total.backward()
        self._optimiser.step()

    def save(self, folder: Path) -> None:
        """As it writes drafters, without the target's embedding."""
        folder.mkdir()
        tensors = {name: each.contiguous() for name, each in self._drafter.state_dict().items()}
        save_file({name: each for name, each in tensors.items() if "embed" not in name}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self._config))


def _imported(site: Path) -> dict[str, Any]:
    """Its modules. On a CPU its loss is the one in torch that stands beside its kernel."""
    if str(site) not in sys.path:
        sys.path.append(str(site))
    mend_torchvision()
    torch.compiler.set_stance("force_eager")
    found = {
        "model": import_module("specforge.algorithms.eagle3.model"),
        "draft": import_module("specforge.modeling.draft.llama3_eagle"),
        "optimizer": import_module("specforge.optimizer"),
        "transformers": import_module("transformers"),
    }
    loss = import_module("specforge.core.loss")
    if not torch.cuda.is_available():
        # override: of this process
        found["model"].LogSoftmaxLoss = type("LogSoftmaxLoss", (), {"apply": staticmethod(loss._compute_loss)})
    return found

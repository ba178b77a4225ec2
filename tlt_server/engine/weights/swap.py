"""The drafter's weights, three times: live, staged, previous. A swap copies between them and into nothing else.

The live tensors keep their storages, so CUDA graphs that were captured over them stay valid. What the drafter shares
with the target (the embedding, for EAGLE the head too) is no part of any of the three: it cannot be written here.
"""

import math
import threading
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

from tlt_server import files
from tlt_server.drafter.header import MOST_HEADER
from tlt_server.drafter.mtp import own_names
from tlt_server.engine.loading.schema import NamedTensor, Spec, not_finite, start_schema
from tlt_server.engine.loading.shadow import shadow_of
from tlt_server.engine.loading.tensorfile import Buffer, TensorFile
from tlt_server.engine.loading.upload import Upload
from tlt_server.errors import UpdateRefused, listed

Tensors = Mapping[str, torch.Tensor]

# What a drafter's tensors do not show by their shapes.
ARCHITECTURE = (
    "architectures",
    "draft_vocab_size",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
)


class DrafterWeights:
    """The weights of upstream's EAGLE draft worker, once its embedding and head are those of the target. One thread at
    a time may call `stage`; `flip` and `flip_back` belong between two steps.

    is_head: whether they are an MTP head's, a part of the target's checkpoint.
    """

    is_head = False

    def __init__(self, draft_worker: Any) -> None:
        from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
        from transformers import PretrainedConfig

        runner, of = draft_worker.draft_runner, draft_worker.target_worker.model_runner
        shared = {id(parameter) for parameter in of.model.parameters()}
        # config.json as it was written: SGLang and transformers rewrite what they load
        path, revision = runner.model_config.model_path, runner.model_config.revision
        self._config: Mapping[str, Any] = PretrainedConfig.get_config_dict(path, revision=revision)[0]
        self._target_vocab = int(of.model_config.vocab_size)
        self._quantized = runner.model_config.quantization is not None
        self._schema = start_schema(runner)
        self._left_out = {name.removeprefix("model.") for name, p in runner.model.named_parameters() if id(p) in shared}
        if path == of.model_config.model_path:
            self._leave_out_target()
        self._draft_worker, self._hot = draft_worker, draft_worker.hot_token_id
        others = sum(parameter.numel() for parameter in runner.model.parameters() if id(parameter) in shared)
        if (part := draft_worker.vocabulary) is not None:  # of the target's head, and no parameter
            self._hot = None
            self._left_out.add("lm_head.weight")
            others += part.head.numel()
        specs = (self._schema or {}).values()
        self._most = _largest(specs, others + self._target_vocab)  # t2d has a byte for each token
        # released with the weights, and comes back with them, as it was (memory.py)
        with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True):
            # A tensor without memory takes whatever is loaded into it, so no loader can reach what is shared.
            self._shadow = shadow_of(
                runner.model, lambda p: torch.empty_like(p, device="meta") if id(p) in shared else p.data.clone()
            )
            pairs = zip(runner.model.parameters(), self._shadow.parameters(), strict=True)
            owned = [(p.data, s.data) for p, s in pairs if not s.is_meta]
            self._live, self._staged = [live for live, _ in owned], [staged for _, staged in owned]
            others = [*_persistent_buffers(runner.model), *([] if self._hot is None else [self._hot])]
            self._live += others
            self._staged += [other.clone() for other in others]
            self._previous = [torch.empty_like(live) for live in self._live]
        device = self._live[0].device
        self._upload, self._at_hand = Upload(device), threading.Lock()
        expected = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) + (1 << 20)
        self._buffer = Buffer(expected, pinned=device.type == "cuda")

    def _leave_out_target(self) -> None:
        """An MTP head's checkpoint is the target's: what is not the head's is none of ours."""
        self.is_head = True
        if (whole := self._schema) is not None:
            self._schema = {name: whole[name] for name in own_names(self._config, whole)}
            self._left_out |= {name.removeprefix("model.") for name in whole.keys() - self._schema.keys()}

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that a checkpoint has for it; empty where that is not known."""
        return self._schema.keys() if self._schema is not None else frozenset()

    # -- off the hot path --

    @torch.no_grad()
    def stage(self, path: Path, sha256: str | None) -> str:
        """Reads, checks and loads a drafter beside the live one; returns its file's sha256, in hexadecimal.

        path: a safetensors file, or a folder that holds one. sha256: what the file's must be.
        Raises UpdateRefused: it is not a drafter for this server; the message says why.
        """
        file = TensorFile(self._file(path), self._buffer, self._most)
        tensors = file.tensors()
        self._check(tensors)
        with self._at_hand, self._upload.aside():
            for name, tensor in tensors.items():
                if not self._is_left_out(name):
                    self._shadow.load_weights([(name, self._upload(tensor))])
            if self._hot is not None:
                tokens: torch.Tensor = self._shadow.hot_token_id  # the target's, for each of the drafter's
                if int(tokens.min()) < 0 or int(tokens.max()) >= self._target_vocab:
                    raise UpdateRefused(f"d2t leads outside of the target's vocabulary, 0 to {self._target_vocab - 1}")
                self._staged[-1].copy_(tokens)
            # after the cast to the drafter's dtype
            if wrong := not_finite((name, p) for name, p in self._shadow.named_parameters() if not p.is_meta):
                raise UpdateRefused(f"{wrong[0]} holds NaN or infinity")
        found = file.sha256()
        if sha256 is not None and found != sha256.lower():
            raise UpdateRefused(f"{path}: its sha256 is {found}, not {sha256.lower()}")
        return found

    def hold_staging(self) -> None:
        """Before the weights' memory is released: waits for what is being staged. What is to be staged waits for
        `let_stage`."""
        self._at_hand.acquire()

    def let_stage(self) -> None:
        """The memory is back."""
        self._at_hand.release()

    def _file(self, path: Path) -> Path:
        if not path.is_dir():
            return path
        self._check_config(path / "config.json")
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise UpdateRefused(f"{path}: it holds {len(found)} safetensors files, a drafter is one")
        return found[0]

    def _check_config(self, path: Path) -> None:
        try:
            config = files.read_object(path)
        except FileNotFoundError:
            return  # then the names and shapes speak for it
        except OSError as error:
            raise UpdateRefused(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise UpdateRefused(f"{path}: {error}") from error
        for key in ARCHITECTURE:
            ours, theirs = self._config.get(key), config.get(key)
            if None not in (ours, theirs) and ours != theirs:
                raise UpdateRefused(f"{path}: {key} is {theirs}, the drafter's is {ours}")

    def _check(self, tensors: Tensors) -> None:
        if self._quantized:
            raise UpdateRefused("the drafter is quantized: what it holds in memory is not what a checkpoint holds")
        if self._schema is None:
            raise UpdateRefused(
                "the drafter was not loaded from a checkpoint, so there is nothing to check this against"
            )
        required = (name for name in self._schema if not self._is_left_out(name))
        wrong = [f"{name} is missing" for name in required if name not in tensors]
        for name, tensor in tensors.items():
            expected = self._schema.get(name)
            if expected is None and not self._is_left_out(name):
                wrong.append(f"{name} is not a tensor of this drafter")
            elif expected is not None and (why := expected.misfit(Spec.of(tensor))):
                wrong.append(f"{name}: {why}")
        if wrong:
            raise UpdateRefused(listed(wrong, between="; "))

    def _is_left_out(self, name: str) -> bool:
        """Names of what is shared with the target, whose values are not the drafter's, and of EAGLE-3's t2d, which
        only its training needs."""
        return name == "t2d" or name.removeprefix("model.") in self._left_out

    # -- between two steps --

    @torch.no_grad()
    def restage(self) -> None:
        """Stages what is active, for a part of it to be loaded over."""
        torch._foreach_copy_(self._staged, self._live)

    @torch.no_grad()
    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Stages tensors that were held against the checkpoint's names and shapes."""
        self._shadow.load_weights(tensors)

    @torch.no_grad()
    def flip(self, *, remember: bool) -> None:
        """Makes the staged weights active; those that were become the previous ones if they are to be remembered."""
        if remember:
            torch._foreach_copy_(self._previous, self._live)
        torch._foreach_copy_(self._live, self._staged)
        self._draft_worker.noise.forget()

    @torch.no_grad()
    def flip_back(self) -> None:
        """Makes the previous weights active."""
        torch._foreach_copy_(self._live, self._previous)
        self._draft_worker.noise.forget()

    @torch.no_grad()
    def reset(self) -> None:
        """Makes random values active, as upstream's check of weights does; not in the map of tokens."""
        for live in self._live:
            if live.is_floating_point():
                live.uniform_()


def _largest(specs: Iterable[Spec], others: int) -> int:
    """Bytes that a file of such tensors may have at most, and of so many other numbers: all of it in float64."""
    return 8 * (sum(math.prod(spec.shape) for spec in specs) + others) + MOST_HEADER


def _persistent_buffers(model: Any) -> list[torch.Tensor]:
    """Those that are state as parameters are: what is not in a file, an update puts back as it was at start."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]

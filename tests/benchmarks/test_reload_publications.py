"""What a publication of the target may change, which routes a machine has, and how weights travel by CUDA IPC."""

import pytest
import torch

from benchmarks.commands.reload.publications import ROUTES, Checksums, moved_as_it_should, routes_here, unexpected
from benchmarks.lib.reload import ipc

BEFORE = {
    "model.embed_tokens.weight": "a",
    "model.layers.0.self_attn.qkv_proj.weight": "b",
    "model.norm.weight": "c",
    "lm_head.weight": "d",
    "draft.model.embed_tokens.weight": "a",
    "draft.lm_head.weight": "d",
    "draft.model.layers.0.self_attn.qkv_proj.weight": "e",
}
MOVED = BEFORE | {
    "model.embed_tokens.weight": "A",
    "model.layers.0.self_attn.qkv_proj.weight": "B",
    "lm_head.weight": "D",
    "draft.model.embed_tokens.weight": "A",
    "draft.lm_head.weight": "D",
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"draft.model.layers.0.self_attn.qkv_proj.weight": "B"},  # the target's, in the drafter
        {"draft.lm_head.weight": "d"},  # left behind
        {"draft.model.embed_tokens.weight": "X"},  # not the target's
        {"model.layers.0.self_attn.qkv_proj.weight": "b"},  # not written
        {"model.norm.weight": "C"},  # not sent
    ],
)
def test_a_publication_changes_the_target_alone(wrong: dict[str, str]) -> None:
    assert moved_as_it_should([BEFORE, BEFORE], [MOVED, MOVED])
    assert not moved_as_it_should([BEFORE, BEFORE], [MOVED, MOVED | wrong])


def test_a_drafter_with_a_head_of_its_own_keeps_it() -> None:
    own = BEFORE | {"draft.lm_head.weight": "h"}
    assert moved_as_it_should([own], [MOVED | {"draft.lm_head.weight": "h"}])
    assert not moved_as_it_should([own], [MOVED])


def test_unexpected_checksums_are_counted() -> None:
    start: Checksums = [BEFORE]
    noise: Checksums = [MOVED]
    assert unexpected(start, noise, [noise, start] * 3) == 0
    assert unexpected(start, noise, [start, noise, start]) == 0
    assert unexpected(start, noise, [noise, start, noise, noise]) == 1  # the last one never came back
    other = [MOVED | {"model.layers.0.self_attn.qkv_proj.weight": "Z"}]
    assert unexpected(start, noise, [noise, start, other, start]) == 1
    into_drafter = [MOVED | {"draft.model.layers.0.self_attn.qkv_proj.weight": "B"}]
    assert unexpected(start, into_drafter, [into_drafter, start]) == 2


def test_routes_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routes_here(1) == ["disk", "tensor", "distributed"]
    monkeypatch.setattr("benchmarks.commands.reload.publications.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert routes_here(1) == list(ROUTES)
    assert routes_here(2) == ["disk", "tensor", "ipc"]


def test_a_flat_buffer_holds_every_tensor() -> None:
    """Read back as checkpoint-engine does."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}
    layout, buffer = ipc.flat(tensors, "cpu")
    for place in layout:
        tensor = tensors[place["name"]]
        assert place["offset"] % 256 == 0
        data = buffer[place["offset"] : place["offset"] + tensor.nbytes]
        assert torch.equal(data.view(place["dtype"]).view(place["shape"]), tensor)

"""Routes of trainers' own builds of SGLang: a version is pulled whole or not at all; ranks differ in their parts."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.api.forks import INDEX, MARK, _pulled, parallelism

Contents = dict[str, bytes]
WEIGHTS = {"config.json": b"{}", "model.safetensors": b"weights"}


def folder(path: Path, contents: Contents) -> Path:
    path.mkdir(parents=True)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


def contents_of(path: Path) -> Contents:
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != MARK}


def test_each_version_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    local = tmp_path / "deep" / "local"
    versions: list[Contents] = [
        {"a.safetensors": b"1", "b.safetensors": b"2", INDEX: b'{"metadata": {}}'},
        {"model.safetensors": b"3" * 100_000, "config.json": b"{}"},
        {"a.safetensors": b"4"},
    ]
    for i, version in enumerate(versions):
        assert _pulled(folder(tmp_path / f"v{i}", version), local) == (200, "Success.")
        assert contents_of(local) == version
    assert [each.name for each in local.parent.iterdir()] == ["local"]


def test_the_same_version_again_is_read_again(tmp_path: Path) -> None:
    """A trainer that begins anew begins with the same numbers."""
    source, local = folder(tmp_path / "v", WEIGHTS), tmp_path / "local"
    _pulled(source, local)
    (source / "model.safetensors").write_bytes(b"others")
    assert _pulled(source, local)[0] == 200
    assert contents_of(local) == WEIGHTS | {"model.safetensors": b"others"}


def test_who_reads_the_version_before_goes_on(tmp_path: Path) -> None:
    local = tmp_path / "local"
    _pulled(folder(tmp_path / "v1", WEIGHTS), local)
    with (local / "model.safetensors").open("rb") as reading:
        _pulled(folder(tmp_path / "v2", WEIGHTS | {"model.safetensors": b"others!"}), local)
        assert reading.read() == b"weights"


DELTA = json.dumps({"metadata": {"delta_encoding": "xor"}}).encode()


@pytest.mark.parametrize(
    ("bad", "status", "said"),
    [
        (None, 400, "No such file or directory"),
        ({"config.json": b"{}"}, 400, "holds no safetensors file"),
        ({**WEIGHTS, INDEX: b"{"}, 400, "not JSON"),
        ({**WEIGHTS, INDEX: DELTA}, 501, "is a delta"),
    ],
)
def test_what_cannot_be_pulled_leaves_all_as_it_was(
    tmp_path: Path, bad: Contents | None, status: int, said: str
) -> None:
    local, source = tmp_path / "local", tmp_path / "bad"
    _pulled(folder(tmp_path / "good", WEIGHTS), local)
    if bad is not None:
        folder(source, bad)
    answered, message = _pulled(source, local)
    assert (answered, contents_of(local)) == (status, WEIGHTS)
    assert said in message
    assert str(source) in message
    assert "\n" not in message


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    source, local = folder(tmp_path / "v", WEIGHTS), folder(tmp_path / "mine", {"thesis.tex": b"1"})
    status, message = _pulled(source, local)
    assert status == 409
    assert str(local) in message
    assert contents_of(local) == {"thesis.tex": b"1"}
    (local / "thesis.tex").unlink()
    assert _pulled(source, local)[0] == 200
    assert _pulled(source, source / "model.safetensors")[0] == 400  # a file
    assert _pulled(source, Path("here")) == (
        400,
        f"{source} and here must be absolute: they are folders on the server's machine",
    )


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_every_rank_has_a_part_of_its_own(tp: int, pp: int, dp: int, ep: int) -> None:
    tp = max(tp, dp, ep)
    args = SimpleNamespace(tp_size=tp, pp_size=pp, dp_size=dp, ep_size=ep, enable_dp_attention=dp > 1)
    found = [parallelism(args, rank) for rank in range(tp * pp)]
    for names in (("tp_rank",), ("ep_rank", "moe_tp_rank"), ("attn_dp_rank", "attn_tp_rank")):
        assert len({(each["pp_rank"], *(each[name] for name in names)) for each in found}) == tp * pp
    for each in found:
        assert each["ep_size"] * each["moe_tp_size"] == each["attn_dp_size"] * each["attn_tp_size"] == tp
        assert all(each[f"{kind}_rank"] < each[f"{kind}_size"] for kind in ("tp", "pp", "ep", "moe_tp", "attn_tp"))

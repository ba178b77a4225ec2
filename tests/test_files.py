"""Files that are read whole, whatever the system reads at once."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server import files


class Few(io.FileIO):
    """Reads little at a time, as Linux does of a file beyond 2 GiB."""

    most = 1

    def read(self, size: int = -1, /) -> bytes:
        return super().read(min(size, self.most))


@given(st.binary(max_size=40), st.integers(1, 7), st.integers(0, 3))
def test_a_file_is_read_whole_in_parts_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, most: int, grew_shorter_by: int
) -> None:
    path: Path = tmp_path_factory.mktemp("file") / "file"
    path.write_bytes(content)

    @contextmanager
    def regular(_: Path, __: int | None = None) -> Iterator[tuple[io.FileIO, int]]:
        with Few(path) as file:
            file.most = most
            yield file, len(content) + grew_shorter_by

    with pytest.MonkeyPatch.context() as patch:
        assert files.read(path) == content
        patch.setattr(files, "regular", regular)
        if not grew_shorter_by:
            assert files.read(path) == content
            return
        with pytest.raises(OSError, match="cut short"):
            files.read(path)

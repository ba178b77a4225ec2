"""Publications in place, without a flush: nobody reads what other weights have left in the cache."""

from pathlib import Path

import pytest

from benchmarks.lib.safety.prefixes import measure
from tests.server.warm import warm_server


@pytest.mark.server
def test_no_request_reads_prefixes_of_weights_that_are_gone(tmp_path: Path) -> None:
    assert measure(4, 3, tmp_path, warm_server) == {"prefix_publications": 4, "stale_prefixes": 0}

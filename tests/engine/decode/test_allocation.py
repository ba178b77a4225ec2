"""What upstream notes of the KV cache that a speculative step was given."""

from types import SimpleNamespace

from sglang.srt.mem_cache.allocation import alloc_for_spec_decode


class Lengths:
    """Of a tensor what is quick: reading it whole, and not one length after another."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def tolist(self) -> list[int]:
        return self._lengths


def test_allocated_lengths_are_read_at_once() -> None:
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=length)) for length in (5, 9, 6)]
    alloc_for_spec_decode(
        None,
        None,
        reqs=reqs,
        req_pool_indices=None,
        cur_kv_lens=None,
        cur_kv_lens_cpu=None,
        nxt_kv_lens=None,
        nxt_kv_lens_cpu=Lengths([7, 8, 6]),
        num_needed_tokens=0,
    )
    assert [req.kv.kv_allocated_len for req in reqs] == [7, 9, 6]

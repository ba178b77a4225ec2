"""Attention of a few queries of each request over all that it has in the cache.

A program has all queries of a request, or a tile of them, for one head of keys and one piece of them; pieces are merged
as in flash-decoding (Dao et al., 2023). Lengths are read on the GPU, and how much is cut into how many pieces is
decided there.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton gives kernels' arguments their types, call by call.

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


class Cut(NamedTuple):
    """keys: that a program reads at a time, of wider heads than 128 fewer. stages: of reading ahead. programs: that a
    pass is cut into where lengths allow it; an H200 has 132 multiprocessors."""

    keys: int
    stages: int
    programs: int


CUTS = {16: Cut(64, 2, 528), 32: Cut(128, 2, 264), 64: Cut(64, 3, 264)}
"""By queries of a tile, as a tensor core takes them: the fastest that were found on an H200, for batches of 1 to 128,
340 to 32,768 keys and heads of 128. A tile of 128 was no faster than two of 64."""
MOST_PIECES = 64
LEAST = 256
"""Keys of a piece, at least: merging takes its time too."""


@triton.jit
def _piece(length, pieces, LEAST: tl.constexpr, KEYS: tl.constexpr):
    """Keys of each piece, where there may be so many pieces."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, pieces), KEYS) * KEYS, LEAST)


@triton.jit
def _read(
    queries, k, v, places, first, length, tail, row, mask, scale, cap, most, total, found, k_stride, v_stride,
    DIM: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr, CAPPED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Some keys more. LAST: there may be fewer, and not all of them are seen by all queries."""
    WIDTH: tl.constexpr = queries.shape[1]
    position, column = first + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    there, within = position < length, column < DIM
    place = tl.load(places + position, mask=there if LAST else None).to(tl.int64)
    key = k + place[None, :] * k_stride + column[:, None]
    value = v + place[:, None] * v_stride + column[None, :]
    if LAST or WIDTH != DIM:
        keys = tl.load(key, mask=there[None, :] & within[:, None], other=0.0)
        values = tl.load(value, mask=there[:, None] & within[None, :], other=0.0)
    else:
        keys, values = tl.load(key), tl.load(value)
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
    if CAPPED:
        scores = (2 * tl.sigmoid(2 * scores / cap) - 1) * cap  # cap * tanh(scores / cap)
    scores *= 1.4426950408889634  # log2(e)
    if LAST:
        other = position - (length - tail)
        if mask is None:
            seen = other[None, :] <= row[:, None]
        else:
            seen = other[None, :] < 0
            for word in tl.static_range(WORDS):
                bits = tl.load(mask + row * WORDS + word, mask=row >= 0, other=0)
                bit = other - 64 * word
                of_word = (bit >= 0) & (bit < 64)
                seen |= (((bits[:, None] >> tl.where(of_word, bit, 0)[None, :]) & 1) != 0) & of_word[None, :]
        scores = tl.where(seen & there[None, :], scores, -float("inf"))
    highest = tl.maximum(most, tl.max(scores, 1))
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    shares = tl.exp2(scores - shift[:, None])
    faded = tl.exp2(most - shift)
    values = values.to(queries.dtype)
    found = found * faded[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
    return highest, total * faded + tl.sum(shares, 1), found


# not specialized: all arms share what is compiled
@triton.jit(do_not_specialize=["ahead", "rows", "tail", "tiles", "pieces", "mask_stride"])
def _attend(
    q, k, v, out, parts, sums, table, requests, lens, mask, scale, v_scale, cap, ahead, rows, tail, tiles, pieces,
    q_stride, table_stride, k_stride, v_stride, mask_stride, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One piece, of one request and head of keys, for one tile of its queries."""
    request, head, piece = tl.program_id(0), tl.program_id(1) // tiles, tl.program_id(2)
    length = tl.load(lens + request).to(tl.int32) + ahead
    size = _piece(length, pieces, LEAST, KEYS)
    begin, end = piece * size, tl.minimum(piece * size + size, length)
    if begin >= length:
        return
    query = (tl.program_id(1) % tiles) * TILE + tl.arange(0, TILE)
    real = query < rows * GROUP
    row = tl.where(real, query // GROUP, -1)
    column = tl.arange(0, WIDTH)
    written = real[:, None] & (column < DIM)[None, :]
    token, of_token = (request * rows + query // GROUP).to(tl.int64), head * GROUP + query % GROUP
    line = token * (HEADS * GROUP) + of_token
    queries = tl.load(q + (token * q_stride + of_token * DIM)[:, None] + column[None, :], mask=written, other=0.0)
    places = table + tl.load(requests + request).to(tl.int64) * table_stride
    k, v = k + head * DIM, v + head * DIM
    mask = mask if mask is None else mask + request * mask_stride
    most, total = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE], tl.float32)
    found = tl.zeros([TILE, WIDTH], tl.float32)
    seen_by_all = begin + tl.maximum(tl.minimum(length - tail, end) - begin, 0) // KEYS * KEYS
    for first in range(begin, seen_by_all, KEYS):
        most, total, found = _read(queries, k, v, places, first, length, tail, row, mask, scale, cap,
                                   most, total, found, k_stride, v_stride, DIM, KEYS, False, CAPPED, WORDS)  # fmt: skip
    for first in tl.range(seen_by_all, end, KEYS, num_stages=1):
        most, total, found = _read(queries, k, v, places, first, length, tail, row, mask, scale, cap,
                                   most, total, found, k_stride, v_stride, DIM, KEYS, True, CAPPED, WORDS)  # fmt: skip
    found = found * (v_scale / tl.where(total == 0, 1.0, total))[:, None]
    if size >= length:
        tl.store(out + line[:, None] * DIM + column[None, :], found.to(out.dtype.element_ty), mask=written)
    else:
        part = line * pieces + piece
        tl.store(parts + part[:, None] * DIM + column[None, :], found, mask=written)
        tl.store(sums + part, most + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["ahead", "lines"])
def _merge(
    out, parts, sums, lens, ahead, lines,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, EACH: tl.constexpr, LEAST: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Some lines, queries' heads, of a request from its pieces. lines: it has. EACH: of a program."""
    request = tl.program_id(0)
    length = tl.load(lens + request).to(tl.int32) + ahead
    size = _piece(length, PIECES, LEAST, KEYS)
    if size >= length:
        return
    piece = tl.arange(0, PIECES)
    of_request = tl.program_id(1) * EACH + tl.arange(0, EACH)
    real = of_request < lines
    line = request.to(tl.int64) * lines + of_request
    there = (piece < tl.cdiv(length, size))[:, None] & real[None, :]
    heights = tl.load(sums + line[None, :] * PIECES + piece[:, None], mask=there, other=-float("inf"))
    highest = tl.max(heights, 0)
    shares = tl.exp2(heights - tl.where(highest == -float("inf"), 0.0, highest)[None, :])
    column = tl.arange(0, WIDTH)
    within = column < DIM
    part = parts + (line[None, :] * PIECES + piece[:, None])[:, :, None] * DIM + column[None, None, :]
    found = tl.load(part, mask=there[:, :, None] & within[None, None, :], other=0.0)
    total = tl.sum(shares, 0)
    merged = tl.sum(found * shares[:, :, None], 0) / tl.where(total == 0, 1.0, total)[:, None]
    at = line[:, None] * DIM + column[None, :]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=real[:, None] & within[None, :])


def attend(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    requests: torch.Tensor,
    lens: torch.Tensor,
    ahead: int,
    scale: float,
    mask: torch.Tensor | None = None,
    cap: float = 0.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Each query sees its request's keys before the queries' own, and of these those up to its own, or as a mask says.

    Args:
        q: [bs * rows, heads, dim], rows of any stride. cache: keys and values, [places, heads of them, dim].
        table: [slots, width] int: the places of a slot's tokens. requests: [bs] int, slots.
        lens: [bs] int, keys of each, of which `ahead` are not counted.
        scale: of scores. cap: of these, softly; 0: none. v_scale: of the values.
        mask: [bs or 1, rows, words] int64: which of the keys `ahead` a query sees, a bit for each, from the lowest on.

    Returns [bs * rows, heads, dim], of the type of `q`.
    """
    (count, heads, dim), (k, v), bs = q.shape, cache, len(lens)
    rows, groups, width = count // bs, k.shape[1], triton.next_power_of_2(dim)
    tile, tiles, cut = _tiled(rows * heads // groups)
    pieces, tail = pieces_of(bs * groups * tiles, cut.programs), rows if mask is None else ahead
    out, apart = q.new_empty(q.shape), count * heads * pieces if pieces > 1 else 1
    parts, sums = q.new_empty(apart, dim, dtype=torch.float32), q.new_empty(apart, dtype=torch.float32)
    shared = {"DIM": dim, "WIDTH": width, "LEAST": LEAST, "KEYS": cut.keys * 128 // max(128, width)}
    _attend[bs, groups * tiles, pieces](
        q, k, v, out, parts, sums, table, requests, lens, mask, scale, v_scale, cap, ahead, rows, tail, tiles, pieces,
        q.stride(0), table.stride(0), k.stride(0), v.stride(0), 0 if mask is None or len(mask) == 1 else mask.stride(0),
        GROUP=heads // groups, HEADS=groups, TILE=tile, CAPPED=cap > 0, WORDS=0 if mask is None else mask.shape[2],
        num_stages=cut.stages, **shared,
    )  # fmt: skip
    if pieces > 1:
        lines, each = rows * heads, max(1, MOST_PIECES // pieces)
        _merge[bs, triton.cdiv(lines, each)](out, parts, sums, lens, ahead, lines, PIECES=pieces, EACH=each, **shared)
    return out


def _tiled(queries: int) -> tuple[int, int, Cut]:
    """Queries of a tile, and tiles."""
    tile = max(min(CUTS), min(max(CUTS), triton.next_power_of_2(queries)))
    return tile, triton.cdiv(queries, tile), CUTS[tile]


def pieces_of(programs: int, most: int) -> int:
    """Into how many each of so many programs' work may be cut, a power of two, for so many programs at most."""
    return min(MOST_PIECES, 1 << max(0, (most // programs).bit_length() - 1))


@triton.jit
def _collect_tails(
    every, tails, lens, rows, bits, ahead, BATCH: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Of a mask over all keys, what says who of the queries sees whom. bits: that it has; beyond, all is seen."""
    request = tl.program_id(0)
    before_it = tl.arange(0, BATCH)
    keys = tl.load(lens + before_it, mask=before_it < request, other=-ahead).to(tl.int64) + ahead
    length = tl.load(lens + request).to(tl.int64) + ahead
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    for word in tl.static_range(WORDS):
        other = 64 * word + place
        bit = tl.sum(keys, 0) * rows + row * length + (length - rows) + other
        real = (row < rows) & (other < rows)
        sees = tl.load(every + bit, mask=real & (bit < bits), other=1).to(tl.int64)
        packed = tl.sum(tl.where(real, sees << place, 0), 1)
        to = tl.arange(0, ROWS)
        tl.store(tails + (request * rows + to) * WORDS + word, packed, mask=to < rows)


def collect_tails(every: torch.Tensor, tails: torch.Tensor, lens: torch.Tensor, ahead: int) -> None:
    """Writes to `tails`, [bs, rows, words] int64, what a mask over all keys says of the last ones. every: [rows * keys
    of a request, one request after another] bool; those that pad the batch may be left out. lens, ahead: as `attend`'s.
    """
    bs, rows, words = tails.shape
    sizes = {"BATCH": triton.next_power_of_2(bs), "ROWS": triton.next_power_of_2(rows), "WORDS": words}
    _collect_tails[(bs,)](every, tails, lens, rows, every.numel(), ahead, **sizes)

"""The walk of the plan kernel: how many blocks the open slot has left when each tile comes.

With `need` the blocks of a tile, overhead included, C the blocks per slot and V the overhead, the room of the open
slot obeys

    room' = max((room - need) mod C, V)

where no tile is empty: a slot's first room C + V is V modulo C. A tile whose room' is V is called *fresh* here: from
it the walk goes on as from the first one. With P the sum of needs up to a tile and z the P of the last fresh tile,

    q = (P - z) mod C;    fresh if q <= V;    room' = V if fresh, else C + V - q

so that all the walk remembers is z, and a tile without a need changes nothing. Both are kept as points of a circle of
2^16 steps in the upper half of 32 bits, where the difference wraps around by itself. C is at most 2^13, so one step of
q is eight steps of the circle, and rounding, under 3 of them, is never taken for one.

The tiles are walked in groups of 32. Every tile finds where its group would leave z if the tile were fresh; then one
step per group suffices: from z, find the first tile that is fresh, and take what it found. With z known before each
group, the tiles of all groups find their own z at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlaplan.kernels.plan_rows import OVERHEAD, SERIAL, SKIP

MAX_SHARE = tl.constexpr(1 << 13)
GROUP = tl.constexpr(32)
_POINT = tl.constexpr(-(1 << 16))  # the bits of a 32-bit word that hold a point


@triton.jit
def _points(weight, share):
    """Where sums of needs lie on the circle."""
    scale = (0xFFFFFFFF // share.to(tl.uint32)).to(tl.uint32)
    rest = (weight.to(tl.uint32) % share.to(tl.uint32)).to(tl.uint32)
    return ((rest * scale) & 0xFFFF0000).to(tl.int32, bitcast=True)


@triton.jit
def _is_fresh(point, last, reach):
    return (point - last).to(tl.uint32, bitcast=True) <= reach


@triton.jit
def _reach(share):
    """The largest distance on the circle that stands for a q of at most V: halfway to the next one."""
    half_way = (2 * OVERHEAD + 1) * 32768 // share
    return ((tl.minimum(half_way, 0xFFFF) << 16) | 0xFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _load_group(scratch_ptr, first, kept, STEPS: tl.constexpr, EVEN: tl.constexpr):
    """Returns the points of every tile's group, four by four.

    Vectors and a barrier behind them, for else a compiler puts each load right before its use, and every step of
    the walk waits for memory.
    """
    points = ()
    for at in tl.static_range(0, STEPS, 4):
        index = first[:, None] + (at + tl.arange(0, 4))[None, :]
        inside = (first + at < kept)[:, None] if EVEN else index < kept
        ptr = tl.multiple_of(scratch_ptr + index, (16, 16))
        four = tl.load(ptr, mask=inside, other=0)
        # Triton adds tuples, and unpacks none.
        points = points + (four,)  # type: ignore[assignment]  # noqa: RUF005
    tl.debug_barrier()
    return points


@triton.jit
def _meet(point, last, reach, at, place, BEHIND: tl.constexpr):
    """The last fresh point once the tile at a place of the group was met, if it lies behind or before one's own."""
    own = at > place if BEHIND else at < place
    return tl.where(_is_fresh(point, last, reach) & own, point, last)


@triton.jit
def _meet_group(points, place, last, reach, STEPS: tl.constexpr, BEHIND: tl.constexpr):
    """Lets every tile meet those of its group that lie behind it, or before it."""
    for at in tl.static_range(0, STEPS, 4):
        even, odd = tl.split(tl.reshape(points[at // 4], [last.shape[0], 2, 2]))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
        last = _meet(p0, last, reach, at, place, BEHIND)
        last = _meet(p1, last, reach, at + 1, place, BEHIND)
        last = _meet(p2, last, reach, at + 2, place, BEHIND)
        last = _meet(p3, last, reach, at + 3, place, BEHIND)
    return last


@triton.jit
def _chain(scratch_ptr, last, reach, left, BLOCK: tl.constexpr):
    """Goes from group to group; returns the last fresh point before each group and behind all of them."""
    groups: tl.constexpr = BLOCK // GROUP
    number = tl.arange(0, groups)
    lane = tl.arange(0, GROUP)
    lasts = tl.zeros([groups], tl.int32)
    word = tl.load(scratch_ptr + lane, mask=lane < left, other=0)
    for group in range(groups):
        index = (group + 1) * GROUP + lane
        following = tl.load(scratch_ptr + index, mask=(index < left) & (group + 1 < groups), other=0)
        lasts = tl.where(number == group, last, lasts)
        found = (lane << 16) | (word & 0xFFFF)
        none = (GROUP << 16) | ((last >> 16) & 0xFFFF)
        last = tl.min(tl.where(_is_fresh(word, last, reach), found, none), 0) << 16
        word = following
    return lasts, last


@triton.jit
def _rooms_by_groups(scratch_ptr, tile, base, kept, weight, need, share, last, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rooms of one block of tiles, found by groups. `weight` is the sum of needs up to each tile.

    Uses the words of these tiles at `scratch_ptr`, of `kept` ones. Returns the rooms and the last fresh point.
    """
    STEPS: tl.constexpr = BLOCK if BLOCK < GROUP else GROUP  # noqa: FURB136 - Triton takes min for its own
    point = _points(weight, share)
    reach = _reach(share)
    tl.store(scratch_ptr + tile, point, mask=tile < kept)
    tl.debug_barrier()
    first = tile // STEPS * STEPS
    place = tile % STEPS
    points = _load_group(scratch_ptr, first, kept, STEPS, EVEN)
    if BLOCK > STEPS:
        end = _meet_group(points, place, point, reach, STEPS, BEHIND=True)
        tl.store(scratch_ptr + tile, (point & _POINT) | ((end >> 16) & 0xFFFF), mask=tile < kept)
        tl.debug_barrier()
        lasts, last = _chain(scratch_ptr + base, last, reach, kept - base, BLOCK)
        mine = tl.reshape(lasts[:, None] + tl.zeros([BLOCK // GROUP, GROUP], tl.int32), [BLOCK])
    else:
        mine = tl.zeros([BLOCK], tl.int32) + last
    mine = _meet_group(points, place, mine, reach, STEPS, BEHIND=False)
    gap = ((_points(weight - need, share) - mine) >> 16) & 0xFFFF
    q = (gap * share + 32768) >> 16
    return tl.where(q <= OVERHEAD, OVERHEAD, share + OVERHEAD - q), last


@triton.jit
def _next_room(room, need, share, EMPTY: tl.constexpr):
    """Room of the open slot behind a tile, in aiter's own terms where empty tiles count."""
    if EMPTY == SKIP:
        rest = room - need
        rest = tl.where(rest < 0, rest + share, rest)
        return tl.maximum(rest, OVERHEAD)
    rest = tl.maximum(room, OVERHEAD) - need
    opened = tl.where(rest < 0, (share - 1 - rest) // share, 0)
    rest += opened * share
    closed = share if EMPTY == SERIAL else 0
    after = tl.where((need == OVERHEAD) & (room < OVERHEAD), closed, rest)
    return tl.where(need > 0, after, room)


@triton.jit
def _rooms_one_by_one(scratch_ptr, tile, base, tiles, need, share, room, BLOCK: tl.constexpr, EMPTY: tl.constexpr):
    """Rooms of one block of tiles where `_rooms_by_groups` does not serve: one tile after the other."""
    if EMPTY == SKIP:
        need = need % share
    tl.store(scratch_ptr + tile, need, mask=tile < tiles)
    tl.debug_barrier()
    only = tl.arange(0, 1)
    now = only + room
    rooms = tl.zeros([BLOCK], tl.int32)
    for index in range(base, tl.minimum(tiles, base + BLOCK)):
        rooms = tl.where(tile == index, now, rooms)
        now = _next_room(now, tl.load(scratch_ptr + index + only), share, EMPTY)
    return rooms, tl.max(now, 0)


@triton.jit
def first_state(share, EMPTY: tl.constexpr):
    """What the walk remembers before the first tile."""
    if EMPTY == SKIP:
        return tl.where(share <= MAX_SHARE, 0, OVERHEAD)
    return share + OVERHEAD


@triton.jit
def find_rooms(
    scratch_ptr,
    tile,
    base,
    tiles,
    kept,
    weight,
    need,
    share,
    state,
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Returns the room that each tile of one block finds, modulo `share` for `SKIP`, and the state behind them.

    `weight` is the sum of needs up to each tile. Scratch: the words of these tiles at `scratch_ptr`, which has `kept`
    of them. EVEN: `kept` is a multiple of 4.
    """
    if EMPTY == SKIP:
        if share <= MAX_SHARE:
            rooms, state = _rooms_by_groups(scratch_ptr, tile, base, kept, weight, need, share, state, BLOCK, EVEN)
        else:
            rooms, state = _rooms_one_by_one(scratch_ptr, tile, base, tiles, need, share, state, BLOCK, EMPTY)
    else:
        rooms, state = _rooms_one_by_one(scratch_ptr, tile, base, tiles, need, share, state, BLOCK, EMPTY)
    return rooms, state

"""The fill of the policy `balanced`: the least of 64 capacities that is enough, and what each tile finds under it.

What a tile finds depends on every tile before it, so the 64 capacities are tried side by side, each by a lane, tile
by tile: that walk is what the kernel waits for. Four things keep a step short.

* Where a tile that does not fit leaves a slot depends on the tile and the capacity alone, but for the blocks that the
  open slot takes. All but those is found ahead of what the step before has left.
* Choices are made with masks: a comparison that guards a choice takes longer than shifting a sign bit does.
* Whole quotients are a multiplication and a shift. With l the logarithm of the divisor d, rounded up, and a factor f
  above 2^(31 + l) / d by at most 2, the product f d is 2^(31 + l) + e with 0 < e <= 2 d <= 2^(l + 1). So N f / 2^(31
  + l) is above N / d by less than 1 / d as long as N < 2^30, and its floor is that of N / d. The upper half of (2 N)
  f, shifted by l, is that floor; for d = 1 too, where the upper half of N times 32 bits would not do. So costs are
  kept twice as large.
* The state of all lanes is kept wherever a group of 16 tiles begins. From that of the lane that is taken, all groups
  are walked at once to find what every tile finds.

The state is a `rest`: a slot's room less that of an empty slot behind a piece's fixed cost, plus 1. It is 1 - x
behind a cut tile whose last piece has blocks of cost x. The walk reads records of the c tiles that are not empty, 64
bits each: twice the cost as a whole above, blocks less one below. Behind them lie the numbers of those tiles and what
is kept, all in `work_info` until works are written: c tiles have at least c works of 8 words, and fewer than 2 c + c
+ 4 c are used.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(64)
GROUP = tl.constexpr(16)
CHUNK = tl.constexpr(4)
_NONE = tl.constexpr((1 << 31) - 1)
_MOST_BLOCKS = tl.constexpr(1 << 20)
_MANY = tl.constexpr(1 << 30)


@triton.jit
def divisor(by):
    """Factor and shift that divide numbers below 2^30 by one of at least 1."""
    by = tl.minimum(by, _MANY)  # the same quotients, and no float that is rounded up to 2^31
    # The exponent of a float is the logarithm, rounded down; the float itself may have been rounded up.
    shift = tl.maximum(((by - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
    shift -= ((shift > 0) & (by <= 1 << tl.maximum(shift - 1, 0))).to(tl.int32)
    # 2^62 over a number of 2^30 to 2^31: a quotient in 32 bits, and what it leaves over again.
    scaled = by.to(tl.int64) << (31 - shift)
    inverse = 1.0 / (by.to(tl.float32) * ((158 - shift) << 23).to(tl.float32, bitcast=True))
    first = tl.minimum(inverse * 2305843009213693952.0, 2147483520.0).to(tl.int32).to(tl.int64) * 2
    left = (1 << 62) - first * scaled
    # Rounded to the nearest number, and so less than 1 off.
    more = ((left >> 12).to(tl.int32).to(tl.float32) * (inverse * 4096.0) + 4096.5).to(tl.int32) - 4096
    return (first + more + 1).to(tl.uint32), shift


@triton.jit
def _divide(twice, factor, shift):
    """The whole quotient of the half of `twice`; any number where that is negative."""
    return (tl.umulhi(twice.to(tl.uint32, bitcast=True), factor) >> shift).to(tl.int32, bitcast=True)


@triton.jit
def blocks_of(tokens, per_block):
    """Blocks that works of so many tokens begin; `per_block` divides by the tokens of a block."""
    behind = tl.maximum(tokens, 1) - 1
    return tl.where(tokens > 0, _divide(behind + behind, per_block[0], per_block[1]) + 1, 0)


@triton.jit
def cost_words(block, piece, whole):
    """The cost table as the functions here take it: twice its costs, and how to divide by that of a block."""
    factor, shift = divisor(block)
    return 2 * block, 2 * piece, 2 * whole, factor, shift


@triton.jit
def slot_words(capacity, costs):
    """A slot's capacity, what the blocks of a piece that fills it cost, and how to divide by those."""
    twice = 2 * capacity
    most = _divide(twice - costs[1], costs[3], costs[4])
    # No tile has more blocks than that.
    factor, shift = divisor(tl.minimum(most, _MOST_BLOCKS))
    return twice, most * costs[0], factor, shift


@triton.jit
def _below_zero(number):
    """All bits where a number is negative, else none."""
    return number >> 31


@triton.jit
def _choose(mask, a, b):
    """`a` where all bits of the mask are set, else `b`."""
    return b ^ ((a ^ b) & mask)


@triton.jit
def _pour(behind, need, rest, slot, costs):
    """Fills slots with tiles that find them with these rests; all costs are twice themselves.

    `behind` is the blocks less one, `need` the cost as a whole. Returns, as masks, whether a tile does not fit as a
    whole and whether the open slot takes nothing of it then; the blocks that it takes else; the slots that are opened
    where it does not fit; and the rest behind.
    """
    block, piece, whole = costs[0], costs[1], costs[2]
    capacity = slot[0]
    # Were all of it to go to fresh slots, but not as a single piece: full pieces, and the rest behind the last one.
    most = tl.minimum(slot[1], need - (whole + block))
    full = tl.maximum(_divide(behind + behind, slot[2], slot[3]), 1)
    cut_rest = full * most + (whole + 1 - need)
    is_large = _below_zero(capacity - need)
    bare_rest = _choose(is_large, cut_rest, piece + 1 - need)
    bare_fresh = (full & is_large) + 1

    fit_rest = rest - need
    is_crowded = _below_zero(fit_rest + (capacity - piece - 1))
    spare = rest + _spare_over_rest(slot, costs)
    # A tile of one block is never cut.
    is_bare = _below_zero(tl.minimum(spare - block, behind - 1))
    head = tl.minimum(_divide(spare, costs[3], costs[4]), behind)
    # What the open slot takes is missing from the last piece, which then may be the one before. Of these two rests
    # the one holds that is negative and nearer to 0: as numbers without a sign, the larger one.
    last = (head * block + cut_rest).to(tl.uint32, bitcast=True)
    before = (head * block + (cut_rest - most)).to(tl.uint32, bitcast=True)
    cut_fresh = full + (last >> 31).to(tl.int32, bitcast=True)
    fresh = _choose(is_bare, bare_fresh, cut_fresh)
    after = _choose(is_crowded, bare_rest, fit_rest)
    after = _choose(is_crowded & ~is_bare, tl.maximum(last, before).to(tl.int32, bitcast=True), after)
    return is_crowded, is_bare, head, fresh, after


@triton.jit
def _pour_short(behind, need, spare, slot, costs):
    """Whether tiles do not fit and what is left, for those that fit an empty slot as a whole.

    Such a tile opens one slot or none: what is left of one that is cut is no dearer than all of it. In place of the
    rest takes and returns `spare`, a slot's room less a piece's fixed cost.
    """
    block, piece, whole = costs[0], costs[1], costs[2]
    fit_spare = spare - need
    is_crowded = _below_zero(fit_spare + piece)
    is_bare = _below_zero(tl.minimum(spare - block, behind - 1))
    head = tl.minimum(_divide(spare, costs[3], costs[4]), behind)
    cut_spare = head * block + (slot[0] - 2 * piece + whole - need)
    after = _choose(is_crowded, slot[0] - piece - need, fit_spare)
    return is_crowded, _choose(is_crowded & ~is_bare, cut_spare, after)


@triton.jit
def _spare_over_rest(slot, costs):
    return slot[0] - 2 * costs[1] - 1


@triton.jit
def _empty(costs):
    """The rest of an empty slot."""
    return costs[1] + 1


@triton.jit
def _whole_cost(blocks, costs):
    return costs[2] + blocks * costs[0]


@triton.jit
def _records(scratch_ptr):
    return scratch_ptr.to(tl.pointer_type(tl.int64))


@triton.jit
def _behind(record):
    """Blocks of a tile less one."""
    return record.to(tl.int32)


@triton.jit
def _need(record):
    """What a tile costs as a whole."""
    return (record >> 32).to(tl.int32)


@triton.jit
def store_records(scratch_ptr, counted, tile, blocks, rank, costs):
    """Leaves the records of tiles; `rank` counts those before a tile that are not empty, of `counted` in all."""
    record = (_whole_cost(blocks, costs).to(tl.int64) << 32) | (blocks - 1).to(tl.int64)
    tl.store(_records(scratch_ptr) + rank, record, mask=blocks > 0)
    tl.store(scratch_ptr + 2 * counted + rank, tile, mask=blocks > 0)


@triton.jit
def _join_records(need, behind, other_need, other_behind):
    return need + other_need, tl.minimum(behind, other_behind)


@triton.jit
def survey_records(scratch_ptr, counted, BLOCK: tl.constexpr):
    """Twice what all tiles cost as a whole, and the fewest blocks of one, less one."""
    total = tl.zeros([], tl.int64)
    fewest = _NONE
    for base in range(0, counted, BLOCK):
        index = base + tl.arange(0, BLOCK)
        record = tl.load(_records(scratch_ptr) + index, mask=index < counted, other=_NONE)
        need, behind = tl.reduce((record >> 32, _behind(record)), 0, _join_records)
        total += need
        fewest = tl.minimum(fewest, behind)
    return total, fewest


@triton.jit
def _load_chunk(scratch_ptr, begin, counted):
    """The records of a chunk for every lane; where it does not end before `counted`, others of no use."""
    first = tl.minimum(begin, counted - CHUNK) + tl.zeros([LANES], tl.int32)
    records = ()
    for at in tl.static_range(CHUNK):
        # Triton adds tuples, and unpacks none.
        records = records + (tl.load(_records(scratch_ptr) + first + at),)  # type: ignore[assignment]  # noqa: RUF005
    return records


@triton.jit
def _step(record, state, opened, slot, costs, SHORT: tl.constexpr):
    """Pours one tile in every lane; the state is `spare` if SHORT, else the rest."""
    behind, need = _behind(record), _need(record)
    if SHORT:
        is_crowded, state = _pour_short(behind, need, state, slot, costs)
        opened -= is_crowded
    else:
        is_crowded, _, _, fresh, state = _pour(behind, need, state, slot, costs)
        opened -= fresh * is_crowded
    return state, opened


@triton.jit
def _pour_chunk(records, state, opened, slot, costs, SHORT: tl.constexpr):
    for at in tl.static_range(CHUNK):
        state, opened = _step(records[at], state, opened, slot, costs, SHORT)
    # A capacity far too small opens so many slots that their number passes 32 bits.
    return state, tl.minimum(opened, _MANY)


@triton.jit
def _keep(kept_ptr, begin, state, offset):
    """Keeps the rests of all lanes if a group but the first begins here."""
    first = tl.zeros([LANES], tl.int32) + begin
    tl.store(kept_ptr + (begin // GROUP - 1) * LANES, state - offset, mask=(first % GROUP == 0) & (first > 0))


@triton.jit
def _walk(scratch_ptr, counted, slot, costs, SHORT: tl.constexpr):
    """Pours all tiles in every lane; returns the slots opened. Keeps the rests of all lanes wherever a group begins."""
    lane = tl.arange(0, LANES)
    offset = _spare_over_rest(slot, costs) if SHORT else tl.zeros([LANES], tl.int32)
    state = _empty(costs) + offset
    opened = tl.zeros([LANES], tl.int32)
    kept_ptr = scratch_ptr + 3 * counted + lane
    whole = counted // (2 * CHUNK) * (2 * CHUNK)
    if whole > 0:
        # While one chunk is poured, the next one is on its way.
        even = _load_chunk(scratch_ptr, 0, counted)
        odd = _load_chunk(scratch_ptr, CHUNK, counted)
        for begin in range(0, whole, 2 * CHUNK):
            _keep(kept_ptr, begin, state, offset)
            state, opened = _pour_chunk(even, state, opened, slot, costs, SHORT)
            even = _load_chunk(scratch_ptr, begin + 2 * CHUNK, counted)
            state, opened = _pour_chunk(odd, state, opened, slot, costs, SHORT)
            odd = _load_chunk(scratch_ptr, begin + 3 * CHUNK, counted)
    for index in range(whole, counted):
        _keep(kept_ptr, index, state, offset)
        record = tl.load(_records(scratch_ptr) + index + lane * 0)
        state, opened = _step(record, state, opened, slot, costs, SHORT)
    return opened


@triton.jit
def least_capacity(scratch_ptr, counted, num_slots, fewest, longest, low, step, costs):
    """The least of `low + j * step` under which the fill of `counted` tiles needs at most `num_slots` slots, and its j.

    `fewest` and `longest` are the fewest and the most blocks of a tile, the former less one. Leaves the rests of all
    lanes wherever a group but the first begins.
    """
    lane = tl.arange(0, LANES)
    capacity = low + lane * step
    slot = slot_words(capacity, costs)
    if 2 * low >= _whole_cost(longest, costs):
        opened = _walk(scratch_ptr, counted, slot, costs, SHORT=True)
    else:
        opened = _walk(scratch_ptr, counted, slot, costs, SHORT=False)
    # A tile of one block cannot be cut.
    enough = (opened < num_slots) & ((fewest > 0) | (_whole_cost(1, costs) <= slot[0]))
    taken = tl.min(tl.where(enough, lane, LANES - 1), 0)
    return low + taken * step, taken


@triton.jit
def find_rests(scratch_ptr, rests_ptr, counted, taken, slot, costs):
    """Writes the rest that every tile finds at the tile's place; none for empty tiles."""
    kept_ptr = scratch_ptr + 3 * counted + taken
    for base in range(0, counted, LANES * GROUP):
        group = base // GROUP + tl.arange(0, LANES)
        begin = group * GROUP
        rest = tl.load(kept_ptr + (group - 1) * LANES, mask=(group > 0) & (begin < counted), other=0)
        rest = tl.where(group > 0, rest, _empty(costs))
        record = tl.load(_records(scratch_ptr) + begin, mask=begin < counted, other=0)
        tile = tl.load(scratch_ptr + 2 * counted + begin, mask=begin < counted, other=0)
        for at in range(GROUP):
            index = begin + at
            next_record = tl.load(_records(scratch_ptr) + index + 1, mask=index + 1 < counted, other=0)
            next_tile = tl.load(scratch_ptr + 2 * counted + index + 1, mask=index + 1 < counted, other=0)
            tl.store(rests_ptr + tile, rest, mask=index < counted)
            _, _, _, _, rest = _pour(_behind(record), _need(record), rest, slot, costs)
            record = next_record
            tile = next_tile


@triton.jit
def fill_cuts(length, rest, block_tokens, per_block, slot, costs):
    """How the fill cuts tiles that find slots with these rests.

    Returns the tokens for the open slot, whether a work of the tile lies there, the slots it opens, and the tokens of
    the works in those.
    """
    blocks = blocks_of(length, per_block)
    counted = tl.maximum(blocks, 1)
    need = _whole_cost(counted, costs)
    is_crowded, is_bare, head, fresh, _ = _pour(counted - 1, need, rest, slot, costs)
    fits = is_crowded == 0
    takes_nothing = is_bare != 0
    head = tl.where(fits, length, tl.where(takes_nothing, 0, head * block_tokens))
    most = tl.minimum(slot[1] // costs[0], counted - 1)
    size = tl.where(takes_nothing & (fresh == 1), length, most * block_tokens)
    fresh = tl.where(fits | (blocks == 0), 0, fresh)
    return head, (fits | (takes_nothing == 0)) & (blocks > 0), fresh, size

"""The fill of the policy `balanced`: the least of 64 capacities that is enough, and what each tile finds under it.

What a tile finds depends on every tile before it, so the 64 capacities are tried side by side, each by a lane, tile
by tile: that walk is what the kernel waits for. What keeps a step short:

* Two numbers go from tile to tile: the open slot's `room`, and how far the room less a piece's fixed cost is `above` a
  multiple of a block's cost. So `room - above` says what blocks an open slot takes, without a division. A tile that
  fits lowers `above` by its fixed cost, modulo that of a block; behind any other it is one of two numbers of the
  capacity.
* Of what may be left, the smallest number holds, negative ones taken for large: a tile that fits leaves less than one
  that does not would, whose last piece has a block at least. So no step asks which one it is.
* Other choices are made with masks: a comparison that guards a choice takes longer than shifting a sign bit does.
* Whole quotients are a multiplication and a shift. With l the logarithm of the divisor d, rounded up, and a factor f
  above 2^(31 + l) / d by at most 2, the product f d is 2^(31 + l) + e with 0 < e <= 2 d <= 2^(l + 1). So N f / 2^(31
  + l) is above N / d by less than 1 / d as long as N < 2^30, and its floor is that of N / d. The upper half of (2 N)
  f, shifted by l, is that floor; for d = 1 too, where the upper half of N times 32 bits would not do.
* The rooms of all lanes are kept wherever a group of 16 tiles begins. From that of the lane that is taken, all groups
  are walked at once to find what every tile finds.

There are three forms of a step. Where every tile fits an empty slot as a whole, none opens more than one slot. Where
none does under any capacity, and each fills a slot and more, `room - above` is all that goes from tile to tile.

The walk reads records of the c tiles that are not empty, 64 bits each: what a tile costs as a whole, and what its
blocks cost but for one. A tile of one block has no other blocks, and is never cut. Its record says instead what a
piece's fixed cost has more than a whole row's, or 0 if that is less: with that number the formulas for a cut give what
a slot has left that holds such a tile alone.
Behind the records lie the numbers of those tiles and what is kept, all in `work_info` until works are written: c tiles
have at least c works of 8 words, and fewer than 2 c + c + 4 c are used. There are few loads, because Triton's compiler
looks at all of this code anew for each of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(64)
GROUP = tl.constexpr(16)
CHUNK = tl.constexpr(4)
_GROUPS = tl.constexpr(64)  # groups that are walked at the same time
_NONE = tl.constexpr((1 << 31) - 1)
_MANY = tl.constexpr(1 << 30)
_SIGN = tl.constexpr(-(1 << 31))

# The forms of a step.
SHORT = tl.constexpr(0)  # every tile fits an empty slot
ANY = tl.constexpr(1)
LARGE = tl.constexpr(2)  # every tile has more blocks than a slot holds, and fits none


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
def _divide(number, factor, shift):
    """The whole quotient of a number below 2^30; any number where that is negative."""
    return (tl.umulhi((number + number).to(tl.uint32, bitcast=True), factor) >> shift).to(tl.int32, bitcast=True)


@triton.jit
def blocks_of(tokens, per_block):
    """Blocks that works of so many tokens begin; `per_block` divides by the tokens of a block."""
    return tl.where(tokens > 0, _divide(tl.maximum(tokens, 1) - 1, per_block[0], per_block[1]) + 1, 0)


@triton.jit
def cost_words(block, piece, whole):
    """The cost table as the functions here take it.

    Three costs, how to divide by that of a block, and what the other two leave when they are.
    """
    factor, shift = divisor(block)
    piece_left = piece - _divide(piece, factor, shift) * block
    whole_left = whole - _divide(whole, factor, shift) * block
    return block, piece, whole, factor, shift, piece_left, whole_left


@triton.jit
def slot_words(capacity, costs):
    """A slot's capacity as the functions here take it.

    The capacity; what the blocks of a piece that fills it cost and how to divide by those; how far the room behind a
    piece, and that behind whole work, in a slot of their own is above a multiple of a block's cost; the most room
    behind a tile that does not fit. With a piece cheaper than a whole row such a tile may fit the open slot as a piece;
    one block is left for another slot all the same, so no room is larger than that behind a piece of one block.
    """
    bare = capacity - costs[1]
    most = _divide(bare, costs[3], costs[4]) * costs[0]
    factor, shift = divisor(most)
    above_piece = _wrap(bare - most - costs[5], costs[0])
    above_whole = _wrap(bare - most - costs[6], costs[0])
    most_room = capacity - tl.where(costs[1] < costs[2], costs[1] + costs[0], 0)
    return capacity, most, factor, shift, above_piece, above_whole, most_room


@triton.jit
def _least(a, b):
    """The smaller one, negative numbers taken for large."""
    return tl.minimum(a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def _wrap(number, by):
    """`number` modulo `by`, from `-by` to `by - 1`."""
    return _least(number, number + by)


@triton.jit
def _below_zero(number):
    """All bits where a number is negative, else none."""
    return number >> 31


@triton.jit
def _sign(number):
    """1 for a negative number, else 0."""
    return (number.to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)


@triton.jit
def _choose(mask, a, b):
    """`a` where all bits of the mask are set, else `b`."""
    return b ^ ((a ^ b) & mask)


@triton.jit
def above_of(room, costs):
    """How far rooms less a piece's fixed cost are above a multiple of a block's cost."""
    left = room - costs[5]
    left += costs[0] & _below_zero(left)
    return left - _divide(left, costs[3], costs[4]) * costs[0]


@triton.jit
def _record(blocks, costs):
    """What tiles of so many blocks cost as a whole, and what their blocks cost but for one, or what stands for it."""
    instead = tl.where(blocks == 1, tl.maximum(costs[1] - costs[2], 0), 0)
    return _whole_cost(blocks, costs), (blocks - 1) * costs[0] + instead


@triton.jit
def _unpack(record):
    """The same from 64 bits."""
    return (record >> 32).to(tl.int32), record.to(tl.int32)


@triton.jit
def _prepare(record, slot, costs, FORM: tl.constexpr):
    """What of a step depends on the tile and the capacity alone."""
    need, behind = record[0], record[1]
    block, piece, whole = costs[0], costs[1], costs[2]
    bare_room = slot[0] - need
    if FORM == LARGE:
        full = _divide(need - whole, slot[2], slot[3])
        ready = (need - whole - full * slot[1] + _gap(slot, costs), full)
    elif FORM == SHORT:
        ready = (need, piece + block, bare_room, bare_room + (whole - 2 * piece))  # type: ignore[assignment]
    else:
        # Were all of it to go to fresh slots, but not as a single piece: full pieces, and the rest behind the last one.
        most = tl.minimum(slot[1], behind)
        full = tl.maximum(_divide(behind, slot[2], slot[3]), 1)
        last_room = slot[0] + (whole - piece) - need + full * most
        is_large = _below_zero(bare_room)
        ready = (  # type: ignore[assignment]
            need,
            # What the open slot has is below this if it takes no block. It takes none of a tile of one block that does
            # not fit; if a piece costs more than a whole row, its room is less than such a piece takes anyway.
            tl.where(behind > 0, piece + block, _MANY),
            _least(bare_room, last_room),
            last_room - piece,
            most,
            full,
            (full & is_large) + 1,
            is_large,
        )
    return ready


@triton.jit
def _step(ready, room, above, opened, slot, costs, FORM: tl.constexpr):
    """Pours one tile into the open slot and fresh ones; returns the state of the slot then open, and slots opened."""
    fit_room = room - ready[0]
    taken = room - above
    is_bare = _below_zero(taken - ready[1])
    cut_room = taken + ready[3]
    if FORM == SHORT:
        is_whole = is_bare
        opened += _sign(fit_room)
    else:
        # What the open slot takes is missing from the last piece, which then may be the one before.
        before = cut_room - ready[4]
        opened += _choose(is_bare, ready[6], ready[5] + _sign(before)) & _below_zero(fit_room)
        cut_room = _least(cut_room, before)
        is_whole = is_bare & ~ready[7]
    room = _least(_least(fit_room, slot[6]), _choose(is_bare, ready[2], cut_room))
    # `_least` takes the one of these two that has no sign put in front.
    fit_above = _wrap(above - costs[6], costs[0]) | (fit_room & _SIGN)
    fill_above = _choose(is_whole, slot[5], slot[4]) | (~fit_room & _SIGN)
    return room, _least(fit_above, fill_above), opened


@triton.jit
def _step_large(ready, free, opened, slot, gap):
    """The same for a tile that fits no slot and has more blocks than one holds.

    `free` is what blocks of the room a piece leaves could be filled with were it not for the next piece's fixed cost,
    of which those are lost that `gap` says.
    """
    usable = tl.maximum(free, gap)
    short = usable - ready[0]
    return _least(short, usable - (ready[0] - slot[1])), opened + ready[1] - _below_zero(short)


@triton.jit
def _gap(slot, costs):
    """What a full piece's blocks cost above those of a piece behind another one."""
    return slot[1] - (slot[0] - 2 * costs[1] - slot[4])


@triton.jit
def _full_room(slot, costs):
    """The room behind a piece that fills a slot."""
    return slot[0] - costs[1] - slot[1]


@triton.jit
def _whole_cost(blocks, costs):
    return costs[2] + blocks * costs[0]


@triton.jit
def _wide(scratch_ptr):
    return scratch_ptr.to(tl.pointer_type(tl.int64))


@triton.jit
def store_records(scratch_ptr, counted, tile, blocks, rank, costs):
    """Leaves the records of tiles; `rank` counts those before a tile that are not empty, of `counted` in all."""
    need, behind = _record(blocks, costs)
    mask = blocks > 0
    tl.store(_wide(scratch_ptr) + rank, (need.to(tl.int64) << 32) | behind.to(tl.int64), mask=mask)
    tl.store(scratch_ptr + 2 * counted + rank, tile, mask=mask)


@triton.jit
def cheapest_tile(scratch_ptr, counted, BLOCK: tl.constexpr):
    """What the tile that has the fewest blocks costs as a whole.

    Brings the records to where the walk finds them soon, too: the walk comes to a line of memory before a load of it
    that was begun some tiles ahead is back.
    """
    cheapest = _NONE
    for base in range(0, counted, BLOCK):
        index = base + tl.arange(0, BLOCK)
        need, _ = _unpack(tl.load(_wide(scratch_ptr) + index, mask=index < counted, other=_NONE << 32))
        cheapest = tl.minimum(cheapest, tl.min(need, 0))
    return cheapest


@triton.jit
def _load_chunk(scratch_ptr, begin, counted):
    """The records of a chunk; of use only if it ends before `counted`, which is a chunk's tiles at least."""
    first = tl.minimum(begin, counted - CHUNK)
    records = ()
    for at in tl.static_range(CHUNK):
        # Triton adds tuples, and unpacks none.
        records = records + (tl.load(_wide(scratch_ptr) + first + at),)  # type: ignore[assignment]  # noqa: RUF005
    return records


@triton.jit
def _load_one(scratch_ptr, index, counted):
    """A record; behind the last one that one again, and something where there is none."""
    return tl.load(_wide(scratch_ptr) + tl.maximum(tl.minimum(index, counted - 1), 0))


@triton.jit
def _prepare_chunk(records, slot, costs, FORM: tl.constexpr):
    ready = ()
    for at in tl.static_range(CHUNK):
        ready = ready + (_prepare(_unpack(records[at]), slot, costs, FORM),)  # type: ignore[assignment]  # noqa: RUF005
    return ready


@triton.jit
def _pour_chunk(ready, state, slot, costs, gap, FORM: tl.constexpr):
    room, above, opened = state
    for at in tl.static_range(len(ready)):
        if FORM == LARGE:
            room, opened = _step_large(ready[at], room, opened, slot, gap)
        else:
            room, above, opened = _step(ready[at], room, above, opened, slot, costs, FORM)
    # A capacity far too small opens so many slots that their number passes 32 bits.
    return room, above, tl.minimum(opened, _MANY)


@triton.jit
def _keep(kept_ptr, begin, room):
    """Keeps the rooms of all lanes if a group begins here."""
    first = tl.zeros([LANES], tl.int32) + begin
    tl.store(kept_ptr + (begin // GROUP - 1) * LANES, room, mask=first % GROUP == 0)


@triton.jit
def _first_state(slot, costs, FORM: tl.constexpr):
    """What goes from tile to tile, before the first one, and what a room is above the first number of that."""
    nothing = tl.zeros([LANES], tl.int32)
    full = _full_room(slot, costs)
    if FORM == LARGE:
        # An empty slot is one that is full, but for being counted.
        state, offset = (nothing, nothing, nothing - 1), full
    else:
        state, offset = (slot[0], full, nothing), nothing
    return state, offset


@triton.jit
def _walk(scratch_ptr, counted, slot, costs, FORM: tl.constexpr):
    """Pours all tiles in every lane; returns the slots opened. Keeps the rooms of all lanes wherever a group begins."""
    nothing = tl.zeros([LANES], tl.int32)
    gap = _gap(slot, costs)
    state, offset = _first_state(slot, costs, FORM)
    kept_ptr = scratch_ptr + 3 * counted + tl.arange(0, LANES)
    whole = counted // (2 * CHUNK) * (2 * CHUNK)
    if whole > 0:
        # While one chunk is poured, the next one is on its way.
        even = _load_chunk(scratch_ptr, nothing, counted)
        odd = _load_chunk(scratch_ptr, nothing + CHUNK, counted)
        for begin in range(0, whole, 2 * CHUNK):
            state = _pour_chunk(_prepare_chunk(even, slot, costs, FORM), state, slot, costs, gap, FORM)
            even = _load_chunk(scratch_ptr, nothing + begin + 2 * CHUNK, counted)
            state = _pour_chunk(_prepare_chunk(odd, slot, costs, FORM), state, slot, costs, gap, FORM)
            odd = _load_chunk(scratch_ptr, nothing + begin + 3 * CHUNK, counted)
            # Behind the loads, which would wait for the store else.
            _keep(kept_ptr, begin + 2 * CHUNK, state[0] + offset)
    record = _load_one(scratch_ptr, nothing + whole, counted)
    for index in range(whole, counted):
        ready = _prepare(_unpack(record), slot, costs, FORM)
        record = _load_one(scratch_ptr, nothing + index + 1, counted)
        state = _pour_chunk((ready,), state, slot, costs, gap, FORM)
    return state[2]


@triton.jit
def _walk_equal(scratch_ptr, counted, blocks, slot, costs):
    """The same in the form LARGE for tiles that all have so many blocks: there is nothing to load or to prepare."""
    nothing = tl.zeros([LANES], tl.int32)
    gap = _gap(slot, costs)
    state, offset = _first_state(slot, costs, LARGE)
    kept_ptr = scratch_ptr + 3 * counted + tl.arange(0, LANES)
    ready = _prepare(_record(blocks + nothing, costs), slot, costs, LARGE)
    four = (ready, ready, ready, ready)
    whole = counted // 8 * 8
    for begin in range(0, whole, 8):
        state = _pour_chunk(four, state, slot, costs, gap, LARGE)
        state = _pour_chunk(four, state, slot, costs, gap, LARGE)
        _keep(kept_ptr, begin + 8, state[0] + offset)
    for _ in range(whole, counted):
        state = _pour_chunk((ready,), state, slot, costs, gap, LARGE)
    return state[2]


@triton.jit
def least_capacity(scratch_ptr, counted, num_slots, cheapest, longest, low, step, costs):
    """The least of `low + j * step` under which the fill of `counted` tiles needs at most `num_slots` slots, and its j.

    `cheapest` is what the tile with the fewest blocks costs as a whole, `longest` the most blocks of one. Leaves the
    rooms of all lanes wherever a group but the first begins.
    """
    lane = tl.arange(0, LANES)
    slot = slot_words(low + lane * step, costs)
    high = low + (LANES - 1) * step
    has_single = cheapest == _whole_cost(1, costs)
    # SHORT would cut a tile of one block if a piece's fixed cost were less than a whole row's.
    is_short = (low >= _whole_cost(longest, costs)) & ((has_single == 0) | (costs[1] >= costs[2]))
    is_large = (high < cheapest) & (high - costs[1] < cheapest - costs[2])
    if is_short:
        opened = _walk(scratch_ptr, counted, slot, costs, FORM=SHORT)
    elif is_large & (cheapest == _whole_cost(longest, costs)):
        opened = _walk_equal(scratch_ptr, counted, longest, slot, costs)
    elif is_large:
        opened = _walk(scratch_ptr, counted, slot, costs, FORM=LARGE)
    else:
        opened = _walk(scratch_ptr, counted, slot, costs, FORM=ANY)
    # A tile of one block cannot be cut.
    enough = (opened < num_slots) & ((has_single == 0) | (cheapest <= slot[0]))
    taken = tl.min(tl.where(enough, lane, LANES - 1), 0)
    return low + taken * step, taken


@triton.jit
def whole_tiles(counted, num_slots, cheapest, longest, costs):
    """What as many whole tiles in every slot cost, if all have as many blocks; more than any capacity if not."""
    each = (counted + num_slots - 1) // num_slots
    cost = each.to(tl.int64) * cheapest
    is_equal = cheapest == _whole_cost(longest, costs)
    return tl.where(is_equal, tl.minimum(cost, _NONE), _NONE).to(tl.int32)


@triton.jit
def find_rooms_of_whole(scratch_ptr, rooms_ptr, counted, num_slots, each_cost, BLOCK: tl.constexpr):
    """Writes the room that every tile finds at the tile's place where as many whole tiles lie in every slot."""
    each = (counted + num_slots - 1) // num_slots
    for base in range(0, counted, BLOCK):
        index = base + tl.arange(0, BLOCK)
        before = index % each
        left = tl.where((before > 0) | (index == 0), each - before, 0)
        tile = tl.load(scratch_ptr + 2 * counted + index, mask=index < counted, other=0)
        tl.store(rooms_ptr + tile, left * each_cost, mask=index < counted)


@triton.jit
def find_rooms_of_fill(scratch_ptr, rooms_ptr, counted, taken, slot, costs):
    """Writes the room that every tile finds at the tile's place; none for empty tiles."""
    kept_ptr = scratch_ptr + 3 * counted + taken
    nothing = tl.zeros([_GROUPS], tl.int32)
    for base in range(0, counted, _GROUPS * GROUP):
        at = base // GROUP + tl.arange(0, _GROUPS) - 1
        begin = (at + 1) * GROUP
        room = tl.load(kept_ptr + at * LANES, mask=(at >= 0) & (begin < counted), other=0)
        room = tl.where(at >= 0, room, slot[0])
        above = above_of(room, costs)
        ready = _prepare(_unpack(_load_one(scratch_ptr, begin, counted)), slot, costs, ANY)
        record = _load_one(scratch_ptr, begin + 1, counted)
        tile = tl.load(scratch_ptr + 2 * counted + begin, mask=begin < counted, other=0)
        for done in range(tl.minimum(counted - base, GROUP)):
            # While one tile is poured, the next one is prepared and the one behind it is on its way. The loads come
            # first, for they would wait for the store else.
            index = begin + done
            following = _load_one(scratch_ptr, index + 2, counted)
            next_tile = tl.load(scratch_ptr + 2 * counted + index + 1, mask=index + 1 < counted, other=0)
            tl.store(rooms_ptr + tile, room, mask=index < counted)
            room, above, _ = _step(ready, room, above, nothing, slot, costs, ANY)
            ready = _prepare(_unpack(record), slot, costs, ANY)
            record = following
            tile = next_tile


@triton.jit
def fill_cuts(length, room, block_tokens, per_block, slot, costs):
    """How the fill cuts tiles that find slots with these rooms.

    Returns the tokens for the open slot, whether a work of the tile lies there, the slots it opens, and the tokens of
    the works in those.
    """
    blocks = blocks_of(length, per_block)
    behind = tl.maximum(blocks, 1) - 1
    need = _whole_cost(behind + 1, costs)
    fits = need <= room
    spare = tl.maximum(room - costs[1], 0)
    head = tl.minimum(_divide(spare, costs[3], costs[4]), behind)
    takes_nothing = head == 0
    is_whole = takes_nothing & (need <= slot[0])
    # Blocks but one that go to fresh slots: if all of them do so, as two pieces at least.
    full = _divide((behind - head) * costs[0], slot[2], slot[3])
    fresh = tl.where(is_whole, 1, tl.maximum(full, takes_nothing.to(tl.int32)) + 1)
    most = tl.minimum(_divide(slot[1], costs[3], costs[4]), behind)
    size = tl.where(is_whole, length, most * block_tokens)
    head = tl.where(fits, length, head * block_tokens)
    fresh = tl.where(fits | (blocks == 0), 0, fresh)
    return head, (fits | (takes_nothing == 0)) & (blocks > 0), fresh, size

//! Four capacities that are filled at once, in 32 bits, which the compiler turns into vector instructions.
//!
//! Without a division: what a slot has room for is carried together with the remainder of that less `piece` by `block`, so that the
//! one less `piece` and the other is whole blocks. A tile that is cut leaves the same remainder whatever it met. Each tile waits for the room
//! that the one before leaves, so what counts is the number of steps from one room to the next.

use super::prices::Prices;

/// Capacities that are tried at once.
pub(super) const LANES: usize = 4;

/// A number per lane.
type Lane = [i32; LANES];

/// How the open slots stand: what they have room for, the remainder of that less `piece` by `block`, and the slots used.
#[derive(Debug, Clone, Copy)]
struct State {
    room: Lane,
    rest: Lane,
    slots: Lane,
}

/// A tile's blocks, their cost, and that of all of it as a whole.
#[derive(Debug, Clone, Copy)]
struct Tile {
    blocks: i32,
    cost_of_blocks: i32,
    cost: i32,
}

/// Pieces of a tile that fill a slot, and the cost of the blocks of the last one, of 1 block up to those of a full one.
#[derive(Debug, Clone, Copy, Default)]
struct Split {
    blocks: i32,
    full: Lane,
    last: Lane,
}

/// A number that the search found to be small.
#[expect(clippy::cast_possible_truncation, reason = "below 2^28")]
#[inline]
fn narrow(n: u64) -> i32 {
    n as i32
}

/// All bits where `n` is negative, else none.
#[inline]
fn below_zero(n: i32) -> i32 {
    n >> 31
}

/// `a` where the mask is set, else `b`.
#[inline]
fn choose(mask: i32, a: i32, b: i32) -> i32 {
    b ^ ((a ^ b) & mask)
}

/// A capacity in every lane, and what follows from it.
#[derive(Debug)]
pub(super) struct Lanes {
    block: i32,
    piece: i32,
    whole: i32,
    /// Remainder of `whole` by `block`.
    whole_rest: i32,
    capacity: Lane,
    /// A slot with room for less takes no block of a tile that does not fit.
    least_cut: i32,
    /// What a piece costs more than a whole row, less one.
    less_than_whole: i32,
    /// Room of a slot behind one block as a piece.
    room_over: Lane,
    /// Room of a slot less two pieces, and more by a whole row.
    more_cut: Lane,
    /// Remainder in an empty slot, behind a piece and behind a whole row.
    rest: Lane,
    rest_after_piece: Lane,
    rest_after_whole: Lane,
    /// Cost of the blocks of a piece that fills a slot, and 1 over their number.
    full: Lane,
    per_block: [f32; LANES],
    /// A tile whose blocks cost no more fits an empty slot of every lane, whole and as a piece.
    short: i32,
    /// A tile whose blocks cost more fits no empty slot, neither whole nor all of it but a block as a piece.
    long: i32,
}

#[expect(
    clippy::inline_always,
    reason = "a call per tile would take the open slots through memory"
)]
impl Lanes {
    /// The capacities, and all that costs with them, are below 2^28.
    ///
    /// Out of line, so that the numbers come from memory four at a time, in their order.
    #[inline(never)]
    pub(super) fn new(capacities: [u64; LANES], prices: &Prices) -> Self {
        let [block, piece, whole] = [prices.block, prices.piece, prices.whole].map(narrow);
        let remainder = |cost: i32| cost - narrow(prices.in_blocks(cost.unsigned_abs().into())) * block;
        let [piece_rest, whole_rest] = [piece, whole].map(remainder);
        let less = |rest: i32, taken: i32| rest - taken + (block & below_zero(rest - taken));
        let capacity = capacities.map(narrow);
        let most = capacities.map(|capacity| narrow(prices.most(capacity)));
        let full = most.map(|blocks| blocks * block);
        let mut rest = capacity;
        for (rest, full) in rest.iter_mut().zip(full) {
            *rest -= piece + full;
        }
        let least = capacity.into_iter().min().unwrap_or(0);
        let largest = capacity.into_iter().max().unwrap_or(0);
        Self {
            block,
            piece,
            whole,
            whole_rest,
            least_cut: piece + block,
            less_than_whole: piece - whole - 1,
            room_over: capacity.map(|capacity| capacity - piece - block),
            more_cut: capacity.map(|capacity| capacity - 2 * piece + whole),
            capacity,
            rest,
            rest_after_piece: rest.map(|rest| less(rest, piece_rest)),
            rest_after_whole: rest.map(|rest| less(rest, whole_rest)),
            full,
            per_block: most.map(|blocks| 1.0 / float(blocks)),
            short: least - piece.max(whole),
            long: full
                .into_iter()
                .max()
                .unwrap_or(0)
                .saturating_add(block)
                .max(largest - whole),
        }
    }

    /// Places all tiles under each capacity; returns the slots that they take.
    ///
    /// It is said beforehand whether there is a fold, and whether there are tiles of a `SINGLE` block: most batches have
    /// neither, and asking costs each tile of theirs a fifth of its time.
    #[inline(never)]
    pub(super) fn walk<const FOLDED: bool, const SINGLE: bool>(
        &self,
        kv_indptr: &[i32],
        fold: usize,
        prices: &Prices,
    ) -> [u64; LANES] {
        let fold = if FOLDED { fold } else { 1 };
        let mut open = self.start();
        let mut split = Split::default();
        for bounds in kv_indptr.windows(2) {
            let tile = self.tile(narrow(prices.blocks(bounds[1] - bounds[0])));
            if tile.blocks == 0 {
                continue;
            }
            if tile.cost_of_blocks <= self.short {
                for _ in 0..fold {
                    open = self.place_short::<SINGLE>(open, tile);
                }
            } else {
                if split.blocks != tile.blocks {
                    split = self.split(tile);
                }
                for _ in 0..fold {
                    open = if tile.cost_of_blocks > self.long {
                        self.place_huge(open, &split)
                    } else {
                        self.place_long(open, tile, &split)
                    };
                }
            }
        }
        open.slots.map(|slots| u64::from(slots.unsigned_abs()))
    }

    #[inline]
    fn tile(&self, blocks: i32) -> Tile {
        let cost_of_blocks = blocks * self.block;
        Tile {
            blocks,
            cost_of_blocks,
            cost: cost_of_blocks + self.whole,
        }
    }

    fn start(&self) -> State {
        State {
            room: self.capacity,
            rest: self.rest,
            slots: [1; LANES],
        }
    }

    /// Places a tile that fits an empty slot, whole and as a piece. Where it may be a `SINGLE` block, that is asked.
    #[inline(always)]
    fn place_short<const SINGLE: bool>(&self, mut open: State, tile: Tile) -> State {
        // A tile of one block is not cut, whatever there is room for.
        let is_single = SINGLE && tile.blocks == 1;
        let least_cut = if is_single { i32::MAX >> 1 } else { self.least_cut };
        let less_than_whole = if is_single {
            i32::MAX >> 1
        } else {
            self.less_than_whole
        };
        for lane in 0..LANES {
            let (room, rest) = (open.room[lane], open.rest[lane]);
            let left = room - tile.cost;
            let closed = below_zero(left);
            let uncut = below_zero(room - least_cut);
            // All of it would fit as a piece, so all blocks but one are taken.
            let over = below_zero(less_than_whole - left);
            // What the next slot has room for is more than `left` by this.
            let more = self.more_cut[lane] - rest;
            let more_uncut = self.capacity[lane] - room;
            let more_over = self.room_over[lane] - left;
            let more = more ^ ((more ^ more_uncut) & uncut) ^ ((more ^ more_over) & over);
            open.room[lane] = left + (more & closed);
            let fresh_rest = choose(uncut, self.rest_after_whole[lane], self.rest_after_piece[lane]);
            open.rest[lane] = choose(closed, fresh_rest, self.rest_behind_whole(rest));
            open.slots[lane] -= closed;
        }
        open
    }

    /// The remainder behind one more whole row.
    #[inline]
    fn rest_behind_whole(&self, rest: i32) -> i32 {
        let rest = rest - self.whole_rest;
        rest + (self.block & below_zero(rest))
    }

    /// Pieces of a tile, were all of it to go to fresh slots. Needs nothing of the tiles before it.
    #[inline]
    fn split(&self, tile: Tile) -> Split {
        let mut split = Split {
            blocks: tile.blocks,
            ..Split::default()
        };
        for lane in 0..LANES {
            split.full[lane] = times(tile.blocks, self.per_block[lane]);
            split.last[lane] = tile.cost_of_blocks - split.full[lane] * self.full[lane];
        }
        split
    }

    /// Places a tile that is always cut, and with a full piece.
    #[inline(always)]
    fn place_huge(&self, mut open: State, split: &Split) -> State {
        for lane in 0..LANES {
            let spare = open.room[lane] - self.piece - open.rest[lane];
            let head = spare & !below_zero(spare);
            let taken = below_zero(split.last[lane] - head - 1);
            let last = split.last[lane] - head + (self.full[lane] & taken);
            open.room[lane] = self.capacity[lane] - self.piece - last;
            open.rest[lane] = self.rest_after_piece[lane];
            open.slots[lane] += 1 + split.full[lane] + taken;
        }
        open
    }

    /// Places a tile of any size.
    #[inline(always)]
    fn place_long(&self, mut open: State, tile: Tile, split: &Split) -> State {
        let all_but_one = tile.cost_of_blocks - self.block;
        for lane in 0..LANES {
            let (room, rest) = (open.room[lane], open.rest[lane]);
            let closed = below_zero(room - tile.cost);
            let over = room - self.piece - rest - all_but_one;
            let head = all_but_one + (over & below_zero(over));
            let head = head & !below_zero(head);
            let untouched = below_zero(head - 1);
            let is_whole = untouched & !below_zero(self.capacity[lane] - tile.cost);
            // What the open slot takes is missing from the last piece, which then may be the one before.
            let taken = below_zero(split.last[lane] - head - 1);
            let last = split.last[lane] - head + (self.full[lane] & taken);
            // A tile that nothing was taken of must not become a single piece: all of its blocks but one, then that one.
            let single = untouched & below_zero(split.full[lane] - 1);
            let last = last - (all_but_one & single);
            let full = split.full[lane] + taken - single;
            let fixed = choose(is_whole, self.whole + tile.cost_of_blocks, self.piece + last);
            let fresh_rest = choose(is_whole, self.rest_after_whole[lane], self.rest_after_piece[lane]);
            open.room[lane] = choose(closed, self.capacity[lane] - fixed, room - tile.cost);
            open.rest[lane] = choose(closed, fresh_rest, self.rest_behind_whole(rest));
            open.slots[lane] += (1 + (full & !is_whole)) & closed;
        }
        open
    }
}

/// Added to a whole number below 2^22, this leaves it in the lower bits of the float.
const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23

/// A number of blocks as a float.
#[expect(clippy::cast_precision_loss, reason = "below 2^20, so it is exact")]
#[inline]
fn float(blocks: i32) -> f32 {
    blocks as f32
}

/// How often `most` goes into `blocks - 1/2`, by the inverse of `most`.
///
/// That quotient is at least `1 / (2 most)` away from a whole number. Rounding moves it by no more than `1.25 * 2^-22` of
/// itself, which is less for up to 2^20 blocks; the sum below then rounds to the whole number under it.
#[inline]
fn times(blocks: i32, per_block: f32) -> i32 {
    whole_bits((float(blocks) - 0.5) * per_block - 0.5)
}

/// The nearest whole number. A cast would first ask whether there is one, which keeps the loop from being vectorised.
#[inline]
fn whole_bits(n: f32) -> i32 {
    (n + SHIFT).to_bits().cast_signed() - SHIFT.to_bits().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_by_floats_are_exact() {
        for most in (1..600).chain([1023, 1024, 4097, 32_768, 65_535]) {
            let per_block = 1.0 / float(most);
            for near in (1..=(1 << 20) / most).step_by(97).chain([1, 2, (1 << 20) / most]) {
                for blocks in [near * most - 1, near * most, near * most + 1] {
                    if (1..1 << 20).contains(&blocks) {
                        let full = times(blocks, per_block);
                        assert_eq!(full, (blocks - 1) / most, "{blocks} / {most}");
                    }
                }
            }
        }
    }
}

//! The least candidate under which the balanced fill needs no more slots than there are.
//!
//! A trial of one candidate is a walk over all tiles that writes nothing. Four candidates are tried at once, in 32 bits where
//! all numbers are small enough, which the compiler turns into vector instructions, and without a division: `room - piece` is
//! carried together with its remainder by `block`. A tile that is cut leaves the same remainder whatever it met.

use super::balanced::CANDIDATES;
use super::prices::Prices;

/// Candidates that are tried at once.
const LANES: usize = 4;

/// What is searched: candidates `low + j * step` for `j` in `0 .. 64`, the last of which is feasible.
#[derive(Debug)]
pub(super) struct Search<'a> {
    pub(super) kv_indptr: &'a [i32],
    pub(super) fold: usize,
    pub(super) slots: u64,
    pub(super) prices: &'a Prices,
    pub(super) low: u64,
    pub(super) step: u64,
    /// Cost of all tiles, whole.
    pub(super) total: u64,
    /// Blocks of the longest row.
    pub(super) longest: u64,
    /// Least candidate under which a tile of one block fits an empty slot.
    pub(super) from: u64,
}

impl Search<'_> {
    /// Returns the least feasible candidate; `guess` is where to look first.
    pub(super) fn least_feasible(&self, guess: u64) -> u64 {
        let last = CANDIDATES - 1;
        let largest = self.low + last * self.step + self.prices.whole + 2 * self.prices.piece;
        // Costs in 32 bits, slots and blocks too, and products of blocks exact in a float.
        if largest >= 1 << 28
            || self.total / self.prices.block >= 1 << 30
            || self.longest >= 1 << 20
            || largest / self.prices.block >= 1 << 16
        {
            return self.bisect(last);
        }
        // The last infeasible and the least feasible candidate that are known bound the answer: `from - 1` and `to`.
        let (mut from, mut to) = (self.from, last);
        let mut tried = run_of(guess.saturating_sub(LANES as u64 / 2), 1, from, to);
        let mut apart = 1;
        while from < to {
            let (before, behind) = (from, to);
            for (candidate, used) in tried.into_iter().zip(self.run(tried)) {
                if used > self.slots {
                    from = from.max(candidate + 1);
                } else {
                    to = to.min(candidate);
                }
            }
            tried = if to == behind && from < to {
                run_of(from + apart - 1, apart, from, to)
            } else if from == before {
                run_of(to.saturating_sub(LANES as u64 * apart), apart, from, to)
            } else {
                run_of(from, (to - from).div_ceil(LANES as u64), from, to)
            };
            apart *= 2;
        }
        to
    }

    /// Walks all tiles with each of the candidates; returns the slots that they use.
    fn run(&self, candidates: [u64; LANES]) -> [u64; LANES] {
        let lanes = Lanes::new(candidates.map(|j| self.low + j * self.step), self.prices);
        let mut open = lanes.start();
        let mut split = Split::default();
        for bounds in self.kv_indptr.windows(2) {
            let blocks = narrow(self.prices.blocks(bounds[1] - bounds[0]));
            if blocks == 0 {
                continue;
            }
            if blocks <= lanes.short {
                for _ in 0..self.fold {
                    lanes.place_short(&mut open, blocks);
                }
            } else {
                if split.blocks != blocks {
                    split = lanes.split(blocks);
                }
                for _ in 0..self.fold {
                    if blocks > lanes.long {
                        lanes.place_huge(&mut open, &split);
                    } else {
                        lanes.place_long(&mut open, &split);
                    }
                }
            }
        }
        open.slots.map(|slots| u64::from(slots.unsigned_abs()))
    }

    fn bisect(&self, most: u64) -> u64 {
        let (mut first, mut least) = (self.from, most);
        while first < least {
            let middle = first.midpoint(least);
            if self.is_feasible(self.low + middle * self.step) {
                least = middle;
            } else {
                first = middle + 1;
            }
        }
        least
    }

    /// Whether the fill under `capacity` needs no more slots than there are. For numbers of any size.
    fn is_feasible(&self, capacity: u64) -> bool {
        let Prices {
            block, piece, whole, ..
        } = *self.prices;
        let fill = self.prices.most(capacity);
        let (mut room, mut used) = (capacity, 1);
        for bounds in self.kv_indptr.windows(2) {
            let blocks = self.prices.blocks(bounds[1] - bounds[0]);
            if blocks == 0 {
                continue;
            }
            let cost = whole + blocks * block;
            for _ in 0..self.fold {
                if cost <= room {
                    room -= cost;
                    continue;
                }
                let head = self.prices.most(room).min(blocks - 1);
                if head == 0 && cost <= capacity {
                    used += 1;
                    room = capacity - cost;
                } else {
                    let (left, most) = (blocks - head, fill.min(blocks - 1));
                    let fresh = left.div_ceil(most);
                    used += fresh;
                    room = capacity - piece - (left - (fresh - 1) * most) * block;
                }
                if used > self.slots {
                    return false;
                }
            }
        }
        true
    }
}

/// Candidates from `first` on, `apart` from each other, all in `from .. to`.
fn run_of(first: u64, apart: u64, from: u64, to: u64) -> [u64; LANES] {
    let last = to.saturating_sub(1).max(from);
    let highest = (last + 1).saturating_sub(LANES as u64).max(from);
    let first = if apart == 1 { first.min(highest) } else { first };
    std::array::from_fn(|lane| (first.max(from) + lane as u64 * apart).min(last))
}

/// A number per lane.
type Lane = [i32; LANES];

/// How the open slots stand: room less `piece` in whole blocks, which may be negative, what is left over, and slots used.
#[derive(Debug, Clone, Copy)]
struct State {
    blocks: Lane,
    rest: Lane,
    slots: Lane,
}

/// Pieces of a tile that fill a slot, and the blocks of the last one, of 1 up to those of a full one.
#[derive(Debug, Clone, Copy, Default)]
struct Split {
    blocks: i32,
    full: Lane,
    last: Lane,
}

/// A number that [`Search::least_feasible`] found to be small.
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

/// A capacity in every lane, as whole blocks and a rest below one.
#[derive(Debug)]
struct Lanes {
    block: i32,
    /// `whole`, and what it is more than `piece`.
    whole: [i32; 2],
    more: [i32; 2],
    /// Room less `piece` in an empty slot: the blocks of a piece that fills it.
    empty: [Lane; 2],
    /// Behind a piece, its blocks apart.
    after_piece: [Lane; 2],
    /// Behind a whole row, its blocks apart.
    after_whole: [Lane; 2],
    /// Blocks of the longest row that fits an empty slot whole; may be negative.
    longest_whole: Lane,
    /// 1 over the blocks of a piece that fills a slot.
    per_block: [f32; LANES],
    /// A tile of at most so many blocks fits an empty slot of every lane, whole or as a piece.
    short: i32,
    /// A tile of more blocks fits no empty slot, neither whole nor all of it but a block as a piece.
    long: i32,
}

impl Lanes {
    fn new(capacities: [u64; LANES], prices: &Prices) -> Self {
        let [block, piece, whole] = [prices.block, prices.piece, prices.whole].map(narrow);
        let divided = |cost: i32| [cost.div_euclid(block), cost.rem_euclid(block)];
        let all = |lost: i32| {
            let parts = capacities.map(|capacity| divided(narrow(capacity) - lost));
            [parts.map(|part| part[0]), parts.map(|part| part[1])]
        };
        let empty = all(piece);
        let longest_whole = all(whole)[0];
        let least = |lane: Lane| lane.into_iter().min().unwrap_or(0);
        let most = |lane: Lane| lane.into_iter().max().unwrap_or(0);
        Self {
            block,
            whole: divided(whole),
            more: divided(whole - piece),
            empty,
            after_piece: all(2 * piece),
            after_whole: all(piece + whole),
            longest_whole,
            per_block: empty[0].map(|most| 1.0 / float(most)),
            short: least(empty[0]).min(least(longest_whole)),
            long: (most(empty[0]) + 1).max(most(longest_whole)),
        }
    }

    fn start(&self) -> State {
        State {
            blocks: self.empty[0],
            rest: self.empty[1],
            slots: [1; LANES],
        }
    }

    /// Places a tile of at most `short` blocks.
    #[inline]
    fn place_short(&self, state: &mut State, blocks: i32) {
        let needed = blocks + self.more[0];
        let cost = blocks + self.whole[0];
        let single = below_zero(blocks - 2);
        for lane in 0..LANES {
            let (room, rest) = (state.blocks[lane], state.rest[lane]);
            let full = below_zero(room - needed + below_zero(rest - self.more[1]));
            let whole_rest = rest - self.whole[1];
            let borrow = below_zero(whole_rest);
            let whole_rest = whole_rest + (self.block & borrow);
            let whole_room = room - cost + borrow;
            // At most all blocks but one go into the open slot, so that at least one is left for a fresh one.
            let uncut = below_zero(room - 1) | single;
            let over = room - (blocks - 1);
            let cut_room = self.after_piece[0][lane] - 1 + (over & below_zero(over));
            let fresh = choose(uncut, self.after_whole[0][lane] - blocks, cut_room);
            let fresh_rest = choose(uncut, self.after_whole[1][lane], self.after_piece[1][lane]);
            state.blocks[lane] = choose(full, fresh, whole_room);
            state.rest[lane] = choose(full, fresh_rest, whole_rest);
            state.slots[lane] -= full;
        }
    }

    /// Pieces of a tile of `blocks` blocks, were all of it to go to fresh slots. Needs nothing of the tiles before it.
    #[inline]
    fn split(&self, blocks: i32) -> Split {
        let mut split = Split {
            blocks,
            ..Split::default()
        };
        for lane in 0..LANES {
            split.full[lane] = times(blocks, self.per_block[lane]);
            split.last[lane] = blocks - product(split.full[lane], self.empty[0][lane]);
        }
        split
    }

    /// Places a tile of more than `long` blocks: always cut, and with a full piece.
    #[inline]
    fn place_huge(&self, state: &mut State, split: &Split) {
        for lane in 0..LANES {
            let room = state.blocks[lane];
            let head = room & !below_zero(room);
            let taken = below_zero(split.last[lane] - head - 1);
            let last = split.last[lane] - head + (self.empty[0][lane] & taken);
            state.blocks[lane] = self.after_piece[0][lane] - last;
            state.rest[lane] = self.after_piece[1][lane];
            state.slots[lane] += 1 + split.full[lane] + taken;
        }
    }

    /// Places a tile of any size.
    #[inline]
    fn place_long(&self, state: &mut State, split: &Split) {
        let blocks = split.blocks;
        let needed = blocks + self.more[0];
        let cost = blocks + self.whole[0];
        for lane in 0..LANES {
            let (room, rest) = (state.blocks[lane], state.rest[lane]);
            let closed = below_zero(room - needed + below_zero(rest - self.more[1]));
            let whole_rest = rest - self.whole[1];
            let borrow = below_zero(whole_rest);
            let whole_rest = whole_rest + (self.block & borrow);
            let whole_room = room - cost + borrow;
            let over = room - (blocks - 1);
            let head = blocks - 1 + (over & below_zero(over));
            let head = head & !below_zero(head);
            let untouched = below_zero(head - 1);
            let is_whole = untouched & !below_zero(self.longest_whole[lane] - blocks);
            // What the open slot takes is missing from the last piece, which then may be the one before.
            let taken = below_zero(split.last[lane] - head - 1);
            let last = split.last[lane] - head + (self.empty[0][lane] & taken);
            // A tile that nothing was taken of must not become a single piece: all of its blocks but one, then that one.
            let single = untouched & below_zero(split.full[lane] - 1);
            let last = last - ((blocks - 1) & single);
            let full = split.full[lane] + taken - single;
            let fresh = choose(
                is_whole,
                self.after_whole[0][lane] - blocks,
                self.after_piece[0][lane] - last,
            );
            let fresh_rest = choose(is_whole, self.after_whole[1][lane], self.after_piece[1][lane]);
            state.blocks[lane] = choose(closed, fresh, whole_room);
            state.rest[lane] = choose(closed, fresh_rest, whole_rest);
            state.slots[lane] += (1 + (full & !is_whole)) & closed;
        }
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

/// `a * b`, which is below 2^20.
#[inline]
fn product(a: i32, b: i32) -> i32 {
    whole_bits(float(a) * float(b))
}

/// The nearest whole number. A cast would first ask whether there is one, which keeps the loop from being vectorised.
#[inline]
fn whole_bits(n: f32) -> i32 {
    (n + SHIFT).to_bits().cast_signed() - SHIFT.to_bits().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::super::CostTable;
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
                        assert_eq!(product(full, most), full * most);
                    }
                }
            }
        }
    }

    /// Random numbers that are the same each time.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % end
        }
    }

    #[test]
    fn lanes_find_what_a_bisection_of_single_trials_finds() {
        let mut random = Random(7);
        for case in 0..4000 {
            let spread = random.below(20) + 1;
            let mut kv_indptr = vec![0];
            for _ in 0..=random.below(40) {
                let length = random.below(1 << spread);
                kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + i32::try_from(length).unwrap());
            }
            let cost = [1 << 4, 1 << 10, 1 << 15, 1 << 20][usize::try_from(random.below(4)).unwrap()];
            let [block, whole, piece] =
                [1, 0, 0].map(|least| u32::try_from(least + random.below(cost)).unwrap());
            let table = CostTable {
                block_tokens: 1,
                block,
                piece: piece.min(whole + block),
                whole,
                ..CostTable::AITER
            };
            let prices = Prices::of(&table);
            let blocks = |bounds: &[i32]| prices.blocks(bounds[1] - bounds[0]);
            let live = || kv_indptr.windows(2).map(blocks).filter(|&n| n > 0);
            let (slots, fold) = (
                random.below(60) + 1,
                1 + usize::try_from(random.below(3)).unwrap(),
            );
            let total = live().map(|n| prices.whole + n * prices.block).sum::<u64>() * fold as u64;
            let low = total.div_ceil(slots).max(prices.piece + prices.block);
            let span =
                prices.whole.max(2 * prices.piece) + prices.block + prices.piece.saturating_sub(prices.whole);
            let step = span.div_ceil(CANDIDATES - 1).max(1);
            let search = Search {
                kv_indptr: &kv_indptr,
                fold,
                slots,
                prices: &prices,
                low,
                step,
                total,
                longest: live().max().unwrap_or(0),
                from: if live().any(|n| n == 1) {
                    (prices.whole + prices.block).saturating_sub(low).div_ceil(step)
                } else {
                    0
                },
            };
            let expected = search.bisect(CANDIDATES - 1);
            for guess in [0, expected.saturating_sub(1), expected, 30, 63, 1000] {
                assert_eq!(
                    search.least_feasible(guess),
                    expected,
                    "case {case}, {guess}: {table:?}"
                );
            }
        }
    }
}

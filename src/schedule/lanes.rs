//! Eight capacities that are filled at once, in 16 bits, which the compiler turns into vector instructions.
//!
//! Counted in blocks, so that there is no product or quotient that waits for the tile before: what a slot has room for is
//! `whole + g * block + f` with `0 <= f < block`, and a row of `n` blocks is whole where `n <= g`. SSE2 has saturating sums, minimum and
//! maximum, and the upper half of a product, for 16 bits and not for 32.

use std::array::from_fn;

use super::prices::{Parts, Prices};

/// Capacities that are tried at once.
pub(super) const LANES: usize = 8;

/// A number per lane.
type Lane = [i16; LANES];

/// How the open slots stand: `g` and `f`, and the slots used.
#[derive(Debug, Clone, Copy)]
struct State {
    blocks: Lane,
    rest: Lane,
    slots: Lane,
}

/// What tiles there are, which says what a walk need not ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Every tile fits an empty slot, whole and as a piece.
    Short,
    /// No tile fits an empty slot, neither whole nor all of it but a block as a piece.
    Long,
    /// At most a quarter of the tiles do not fit an empty slot, whole and as a piece.
    Mixed,
    Any,
}

/// Capacities, and what follows from each.
#[derive(Debug)]
pub(super) struct Lanes {
    kind: Kind,
    /// Blocks of a tile that fits an empty slot of every lane, whole and as a piece.
    fits: i16,
    /// `whole` as blocks and a rest, and `whole - piece` as blocks.
    whole: Small,
    over_piece: i16,
    /// A rest from which on `whole - piece` is one block more.
    carry_from: i16,
    block: i16,
    /// Room of an empty slot, of one behind a piece of no blocks, and of one behind a whole row of none.
    fresh: [Lane; 2],
    behind_piece: [Lane; 2],
    behind_whole: [Lane; 2],
    one: Lane,
    whole_blocks: Lane,
    /// Room of a slot behind a piece of one block, as a whole row and as a piece.
    behind_single: Lane,
    head_behind_single: Lane,
    whole_dearer: Lane,
    whole_dearer_single: Lane,
    other_rest: Lane,
    /// Blocks of a piece that fills a slot, or of the longest row if that is less, and 2^16 over their number, rounded up.
    most: Lane,
    per_block: [u16; LANES],
}

/// A cost as blocks and a rest, in 16 bits.
#[derive(Debug, Clone, Copy)]
struct Small {
    blocks: i16,
    rest: i16,
}

/// A number that was found to be small.
#[expect(clippy::cast_possible_truncation, reason = "checked where the lanes are made")]
#[inline]
fn narrow(n: i64) -> i16 {
    n as i16
}

/// All bits where it is so, else none.
#[inline]
fn mask(is_so: bool) -> i16 {
    -i16::from(is_so)
}

/// `a` where the mask is set, else `b`.
#[inline]
fn choose(mask: i16, a: i16, b: i16) -> i16 {
    b ^ ((a ^ b) & mask)
}

const SHORT: u8 = 0;
const LONG: u8 = 1;
const MIXED: u8 = 2;
const ANY: u8 = 3;

/// Largest number of blocks in a lane.
const MOST_BLOCKS: i64 = 1 << 14;

impl Lanes {
    /// The walks that the capacities allow; `None` where some number is not small.
    #[inline(never)]
    pub(super) fn new(capacities: [u64; LANES], [shortest, longest]: [u64; 2], [rows, blocks]: [u64; 2], slots: u64, prices: &Prices) -> Option<Self> {
        let [block, piece, whole] = [prices.block, prices.piece, prices.whole].map(u64::cast_signed);
        let [shortest, longest] = [shortest, longest].map(u64::cast_signed);
        let largest = capacities.into_iter().max().unwrap_or(0).cast_signed();
        if block > i16::MAX.into()
            || largest.max(2 * whole).max(whole + piece) >= MOST_BLOCKS * block
            || longest >= MOST_BLOCKS
            || slots >= 1 << 14
        {
            return None;
        }
        let lanes = |less: i64| {
            let mut parts = [[0; LANES]; 2];
            for (lane, capacity) in capacities.into_iter().enumerate() {
                let Parts { blocks, rest } = prices.parts(capacity.cast_signed() - less);
                parts[0][lane] = narrow(blocks);
                parts[1][lane] = narrow(rest);
            }
            parts
        };
        let small = |cost| {
            let Parts { blocks, rest } = prices.parts(cost);
            Small { blocks: narrow(blocks), rest: narrow(rest) }
        };
        let fresh = lanes(whole);
        let ([head, _], [head_behind, _]) = (lanes(piece), lanes(2 * piece));
        let most = head.map(|most| most.min(narrow(longest)));
        let fits = fresh[0].into_iter().chain(head).min().unwrap_or(0);
        let [least, largest] = [most.into_iter().min(), most.into_iter().max()].map(|most| most.unwrap_or(0));
        let kind = if longest <= fits.into() {
            Kind::Short
        } else if shortest > (largest + 1).max(fresh[0].into_iter().max().unwrap_or(0)).into() {
            Kind::Long
        } else if blocks < rows / 4 * (fits.max(0).unsigned_abs() as u64 + 1) {
            Kind::Mixed
        } else {
            Kind::Any
        };
        if kind != Kind::Short && (least < 2 || i64::from(largest) * (longest - 1) >= 1 << 16) {
            return None;
        }
        let (behind_piece, behind_whole) = (lanes(piece + whole), lanes(2 * whole));
        let over_piece = small(whole - piece);
        Some(Self {
            kind,
            fits,
            whole: small(whole),
            over_piece: over_piece.blocks + 1,
            carry_from: narrow(block) - over_piece.rest,
            block: narrow(block),
            fresh: if kind == Kind::Long { [head, head] } else { fresh },
            behind_piece,
            behind_whole,
            one: std::hint::black_box([1; LANES]), whole_blocks: std::hint::black_box([small(whole).blocks; LANES]),
            behind_single: behind_piece[0].map(|blocks| blocks - 1),
            head_behind_single: head_behind.map(|blocks| blocks - 1),
            whole_dearer: from_fn(|lane| behind_whole[0][lane] - behind_piece[0][lane]),
            whole_dearer_single: from_fn(|lane| behind_whole[0][lane] - behind_piece[0][lane] + 1),
            other_rest: from_fn(|lane| behind_whole[1][lane] ^ behind_piece[1][lane]),
            most,
            per_block: most.map(|most| ((1_u32 << 16) / u32::from(most.max(2).unsigned_abs()) + 1) as u16),
        })
    }

    /// Places all tiles under each capacity; returns the slots that they take.
    pub(super) fn walk(&self, kv_indptr: &[i32], fold: usize, prices: &Prices) -> [u64; LANES] {
        let slots = match (self.kind, fold) {
            (Kind::Short, 1) => self.walk_of::<SHORT, false>(kv_indptr, 1, prices),
            (Kind::Short, _) => self.walk_of::<SHORT, true>(kv_indptr, fold, prices),
            (Kind::Long, 1) => self.walk_of::<LONG, false>(kv_indptr, 1, prices),
            (Kind::Long, _) => self.walk_of::<LONG, true>(kv_indptr, fold, prices),
            (Kind::Mixed, 1) => self.walk_of::<MIXED, false>(kv_indptr, fold, prices),
            (Kind::Mixed, _) => self.walk_of::<MIXED, true>(kv_indptr, fold, prices),
            (Kind::Any, 1) => self.walk_of::<ANY, false>(kv_indptr, 1, prices),
            (Kind::Any, _) => self.walk_of::<ANY, true>(kv_indptr, fold, prices),
        };
        slots.map(|slots| u64::from(slots.unsigned_abs()))
    }

    #[inline(never)]
    fn walk_of<const KIND: u8, const FOLDED: bool>(
        &self,
        kv_indptr: &[i32],
        fold: usize,
        prices: &Prices,
    ) -> Lane {
        let fold = if FOLDED { fold } else { 1 };
        let mut open = State {
            blocks: self.fresh[0],
            rest: self.fresh[1],
            slots: [1; LANES],
        };
        for bounds in kv_indptr.windows(2) {
            let blocks = narrow(prices.blocks(bounds[1] - bounds[0]).cast_signed());
            if blocks == 0 {
                continue;
            }
            for _ in 0..fold {
                open = match KIND {
                    SHORT => self.place_short(open, blocks),
                    MIXED if blocks <= self.fits => self.place_short(open, blocks),
                    LONG => self.place_long(open, blocks),
                    _ => self.place(open, blocks),
                };
            }
        }
        open.slots
    }

    /// Places a tile that fits an empty slot, whole and as a piece.
    #[inline(always)]
    fn place_short(&self, mut open: State, n: i16) -> State {
        let n = [n; LANES];
        for lane in 0..LANES {
            let (n, room, rest) = (n[lane], open.blocks[lane], open.rest[lane]);
            let closed = mask(n > room);
            let head = room + self.over_piece + mask(rest < self.carry_from);
            let head = head.min(n - self.one[lane]);
            let cut = mask(head > 0);
            let behind = self.behind_piece[0][lane] - n + choose(cut, head, self.whole_dearer[lane]);
            let behind_rest = self.behind_whole[1][lane] ^ (cut & self.other_rest[lane]);
            let left = rest - self.whole.rest;
            let borrowed = left >> 15;
            open.blocks[lane] = choose(closed, behind, room - n - self.whole_blocks[lane] + borrowed);
            open.rest[lane] = choose(closed, behind_rest, left + (self.block & borrowed));
            open.slots[lane] = open.slots[lane].saturating_sub(closed);
        }
        open
    }

    /// Places a tile of any size.
    #[inline(always)]
    fn place(&self, mut open: State, n: i16) -> State {
        let n = [n; LANES];
        for lane in 0..LANES {
            let (n, room, rest) = (n[lane], open.blocks[lane], open.rest[lane]);
            let all_but_one = n - self.one[lane];
            // Pieces that fill a slot, were all of it to go to fresh slots, and the blocks of the last one less one.
            let full = times(all_but_one, self.per_block[lane]);
            let last = all_but_one - full * self.most[lane];
            let is_whole = mask(n <= self.fresh[0][lane]);
            let is_single = mask(n <= self.most[lane]);
            // What the open slot takes is missing from the last piece, which then may be the one before.
            let head = room + self.over_piece + mask(rest < self.carry_from);
            let head = head.min(all_but_one).max(0);
            let cut = mask(head > 0);
            let left = last - head;
            let taken = left >> 15;
            let left = left + (self.most[lane] & taken);
            // What nothing was taken of is whole if it fits an empty slot. If it would fit as a single piece it has two: all of its blocks but
            // one, then that one.
            let is_other = (is_whole | is_single) & !cut;
            let left = choose(is_other, is_whole & (n - self.whole_dearer_single[lane]), left);
            let behind = self.behind_single[lane] - left;
            let behind_rest = self.behind_piece[1][lane] ^ (is_whole & !cut & self.other_rest[lane]);
            let more = self.one[lane] + full + taken + ((is_whole - is_single) & !cut);
            let closed = mask(n > room);
            let left = rest - self.whole.rest;
            let borrowed = left >> 15;
            open.blocks[lane] = choose(closed, behind, room - n - self.whole_blocks[lane] + borrowed);
            open.rest[lane] = choose(closed, behind_rest, left + (self.block & borrowed));
            open.slots[lane] = open.slots[lane].saturating_add(more & closed);
        }
        open
    }

    /// Places a tile that is always cut, and with a piece that fills a slot.
    ///
    /// Here `blocks` is what the open slot has room for as a piece, which may be below 0.
    #[inline(always)]
    fn place_long(&self, mut open: State, n: i16) -> State {
        let all_but_one: Lane = from_fn(|lane| n - self.one[lane]);
        let full: Lane = from_fn(|lane| times(all_but_one[lane], self.per_block[lane]));
        let head = open.blocks.map(|blocks| blocks.max(0));
        let left: Lane = from_fn(|lane| all_but_one[lane] - full[lane] * self.most[lane] - head[lane]);
        let taken = left.map(|left| left >> 15);
        open.blocks = from_fn(|lane| self.head_behind_single[lane] - left[lane] - (self.most[lane] & taken[lane]));
        open.slots = from_fn(|lane| open.slots[lane].saturating_add(self.one[lane] + full[lane] + taken[lane]));
        open
    }
}

/// How often `most` goes into `blocks`, by `per_block`, which is 2^16 over `most`, rounded up.
///
/// `blocks * per_block` is `blocks * 2^16 / most` and at most `blocks` more, so the quotient is right as long as `blocks * most` is below 2^16.
#[expect(clippy::cast_possible_truncation, reason = "the upper half of 32 bits")]
#[inline]
fn times(blocks: i16, per_block: u16) -> i16 {
    (((u32::from(blocks.cast_unsigned())) * u32::from(per_block)) >> 16) as u16 as i16
}

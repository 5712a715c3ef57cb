//! Eight capacities that are filled at once, in 16 bits, which the compiler turns into vector instructions.
//!
//! Counted in blocks, by the rules of [`super::rules`], so that no product or quotient waits for the tile before. SSE2 has minimum, maximum and
//! saturating sums for 16 bits, and not for 32. A tile that is asked everything takes three times as long as one of a simple kind, so there
//! are several kinds of walks: most batches need not ask everything.

use std::array::from_fn;
use std::hint::black_box;

use super::kind::{Kind, LANES, Lane, Trial};
use super::prices::{Parts, Prices};

/// No number of blocks is as large, nor is that of the slots.
const MOST_BLOCKS: i64 = 1 << 14;

/// How the open slots stand: room for `whole + blocks * block + rest`, `rest` being below `block`, and the slots used.
#[derive(Debug, Clone, Copy)]
struct State {
    blocks: Lane,
    rest: Lane,
    slots: Lane,
}

/// Capacities, and what follows from each.
#[derive(Debug)]
pub(super) struct Lanes {
    kind: Kind,
    /// Blocks of a tile that fits under each capacity, and those that no slot has room for more than.
    fits: i16,
    largest: i16,
    block: i16,
    /// What a whole row costs beside its blocks: the rest.
    whole_rest: i16,
    /// `whole - piece` in blocks, and one more; without that one for a rest below `carry_from`.
    over_piece: i16,
    carry_from: i16,
    /// 1, and the blocks of `whole`, once per lane.
    one: Lane,
    whole_blocks: Lane,
    /// How an empty slot stands.
    fresh: [Lane; 2],
    /// Blocks behind a piece of none and behind one of one block, and the rest.
    behind_piece: Lane,
    behind_single: Lane,
    rest_behind_piece: Lane,
    /// Blocks that the room behind a piece of one block is enough for as a piece.
    head_behind_single: Lane,
    /// What a whole row has behind it more than a piece of no blocks, and than one of one block, and where its rest differs.
    more_behind_whole: Lane,
    more_than_single: Lane,
    other_rest: Lane,
    /// Blocks of a piece that fills a slot, or of the longest row if that is less, and 2^16 over their number, rounded up.
    most: Lane,
    per_block: [u16; LANES],
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

#[expect(
    clippy::inline_always,
    reason = "a call per tile would take the open slots through memory"
)]
impl Lanes {
    /// What the capacities give; `None` where some number is not small.
    #[inline(never)]
    pub(super) fn new(trial: &Trial, prices: &Prices) -> Option<Self> {
        let [block, piece, whole] = [prices.block, prices.piece, prices.whole].map(u64::cast_signed);
        let capacities = trial.capacities.map(u64::cast_signed);
        let largest = capacities.into_iter().fold(2 * whole.max(piece), i64::max);
        if block > i16::MAX.into()
            || largest >= MOST_BLOCKS * block
            || trial.longest.max(trial.slots) >= MOST_BLOCKS.unsigned_abs()
        {
            return None;
        }
        let empty = capacities.map(|capacity| prices.parts(capacity));
        let [empty, empty_rest] = [
            empty.map(|parts| narrow(parts.blocks)),
            empty.map(|parts| narrow(parts.rest)),
        ];
        let behind = |cost: i64| {
            let Parts { blocks, rest } = prices.parts(cost);
            let rests = empty_rest.map(|empty_rest| empty_rest - narrow(rest));
            let borrowed = rests.map(|rest| rest >> 15);
            let blocks: Lane = from_fn(|lane| empty[lane] - narrow(blocks) + borrowed[lane]);
            let rests: Lane = from_fn(|lane| rests[lane] + (narrow(block) & borrowed[lane]));
            [blocks, rests]
        };
        let fresh = behind(whole);
        let [head, _] = behind(piece);
        let [head_behind, _] = behind(2 * piece);
        let [behind_piece, rest_behind_piece] = behind(piece + whole);
        let [behind_whole, rest_behind_whole] = behind(2 * whole);
        let most = head.map(|most| most.min(narrow(trial.longest.cast_signed())));
        let fits = fresh[0].into_iter().chain(head).min().unwrap_or(0);
        let largest = fresh[0].into_iter().chain(most).max().unwrap_or(0);
        let kind = Kind::of(trial, prices, [fits, largest], &most)?;
        let Parts { blocks, rest } = prices.parts(whole);
        let over_piece = prices.parts(whole - piece);
        Some(Self {
            kind,
            fits,
            largest,
            block: narrow(block),
            whole_rest: narrow(rest),
            over_piece: narrow(over_piece.blocks + 1),
            carry_from: narrow(block - over_piece.rest),
            // Were they known to be the same in all lanes, each sum with a tile's blocks would be made before it is spread to the lanes,
            // which takes three instructions.
            one: black_box([1; LANES]),
            whole_blocks: black_box([narrow(blocks); LANES]),
            // A walk of long tiles asks for room as a piece only.
            fresh: if kind == Kind::Long { [head, head] } else { fresh },
            behind_piece,
            behind_single: behind_piece.map(|blocks| blocks - 1),
            rest_behind_piece,
            head_behind_single: head_behind.map(|blocks| blocks - 1),
            more_behind_whole: from_fn(|lane| behind_whole[lane] - behind_piece[lane]),
            more_than_single: from_fn(|lane| behind_whole[lane] - behind_piece[lane] + 1),
            other_rest: from_fn(|lane| rest_behind_whole[lane] ^ rest_behind_piece[lane]),
            most,
            per_block: most.map(per_block),
        })
    }

    /// Places all tiles under each capacity; returns the slots that they take, `MOST_BLOCKS` or more where that is not known.
    pub(super) fn walk(&self, kv_indptr: &[i32], fold: usize, prices: &Prices) -> [u64; LANES] {
        let slots = match self.kind {
            Kind::Short => self.walk_as::<{ Kind::Short as u8 }>(kv_indptr, fold, prices),
            Kind::Long => self.walk_as::<{ Kind::Long as u8 }>(kv_indptr, fold, prices),
            Kind::Mixed => self.walk_as::<{ Kind::Mixed as u8 }>(kv_indptr, fold, prices),
            Kind::Any => self.walk_as::<{ Kind::Any as u8 }>(kv_indptr, fold, prices),
            Kind::Wide => self.walk_as::<{ Kind::Wide as u8 }>(kv_indptr, fold, prices),
        };
        slots.map(|slots| u64::from(slots.unsigned_abs()))
    }

    #[inline]
    fn walk_as<const KIND: u8>(&self, kv_indptr: &[i32], fold: usize, prices: &Prices) -> Lane {
        if fold == 1 {
            self.walk_rows::<KIND, false>(kv_indptr, 1, prices)
        } else {
            self.walk_rows::<KIND, true>(kv_indptr, fold, prices)
        }
    }

    #[inline(never)]
    fn walk_rows<const KIND: u8, const FOLDED: bool>(
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
                    kind if kind == Kind::Short as u8 => self.place_short(open, blocks),
                    kind if kind == Kind::Long as u8 => self.place_long(open, blocks),
                    kind if kind == Kind::Mixed as u8 && blocks <= self.fits => {
                        self.place_short(open, blocks)
                    }
                    kind if kind == Kind::Mixed as u8 && blocks > self.largest => {
                        self.place_cut(open, blocks)
                    }
                    kind if kind == Kind::Wide as u8 => self.place::<true>(open, blocks),
                    _ => self.place::<false>(open, blocks),
                };
            }
        }
        open.slots
    }

    /// Places a tile that fits an empty slot, whole and as a piece.
    #[inline(always)]
    fn place_short(&self, mut open: State, blocks: i16) -> State {
        for (lane, n) in [blocks; LANES].into_iter().enumerate() {
            let (room, rest) = (open.blocks[lane], open.rest[lane]);
            let closed = mask(n > room);
            let head = self.head(room, rest).min(n - self.one[lane]);
            let is_cut = mask(head > 0);
            let more = choose(is_cut, head, self.more_behind_whole[lane]);
            let behind = self.behind_piece[lane] - n + more;
            let behind_rest =
                self.rest_behind_piece[lane] ^ self.other_rest[lane] ^ (is_cut & self.other_rest[lane]);
            let (left, left_rest) = self.behind_whole(lane, n, room, rest);
            open.blocks[lane] = choose(closed, behind, left);
            open.rest[lane] = choose(closed, behind_rest, left_rest);
            open.slots[lane] = open.slots[lane].saturating_sub(closed);
        }
        open
    }

    /// Places a tile of any size, if it is not one of a single block that fits no empty slot.
    #[inline(always)]
    fn place<const WIDE: bool>(&self, mut open: State, blocks: i16) -> State {
        for (lane, n) in [blocks; LANES].into_iter().enumerate() {
            let (room, rest) = (open.blocks[lane], open.rest[lane]);
            let all_but_one = n - self.one[lane];
            // Pieces that fill a slot, were all of it to go to fresh slots, and the blocks of the last one less one.
            let full = times(all_but_one, self.per_block[lane]);
            let last = all_but_one - full * self.most[lane];
            let over = if WIDE { last >> 15 } else { 0 };
            let (full, last) = (full + over, last + (self.most[lane] & over));
            // What the open slot takes is missing from the last piece, which then may be the one before.
            let head = self.head(room, rest).min(all_but_one).max(0);
            let is_cut = mask(head > 0);
            let left = last - head;
            let taken = left >> 15;
            let left = left + (self.most[lane] & taken);
            // What nothing is taken of is whole if it fits. If all of it would fit as a piece it has two: all of its blocks but one, then
            // that one.
            let is_whole = mask(n <= self.fresh[0][lane]);
            let is_single = mask(n <= self.most[lane]);
            let left = choose(
                (is_whole | is_single) & !is_cut,
                is_whole & (n - self.more_than_single[lane]),
                left,
            );
            let slots = self.one[lane] + full + taken + ((is_whole - is_single) & !is_cut);
            let behind = self.behind_single[lane] - left;
            let behind_rest = self.rest_behind_piece[lane] ^ (is_whole & !is_cut & self.other_rest[lane]);
            let closed = mask(n > room);
            let (left, left_rest) = self.behind_whole(lane, n, room, rest);
            open.blocks[lane] = choose(closed, behind, left);
            open.rest[lane] = choose(closed, behind_rest, left_rest);
            open.slots[lane] = open.slots[lane].saturating_add(slots & closed);
        }
        open
    }

    /// Places a tile of more blocks than any slot has room for.
    #[inline(always)]
    fn place_cut(&self, mut open: State, blocks: i16) -> State {
        for (lane, n) in [blocks; LANES].into_iter().enumerate() {
            let all_but_one = n - self.one[lane];
            let full = times(all_but_one, self.per_block[lane]);
            let last = all_but_one - full * self.most[lane];
            let head = self.head(open.blocks[lane], open.rest[lane]).max(0);
            let taken = mask(head > last);
            let slots = self.one[lane] + full + taken;
            open.blocks[lane] = self.behind_single[lane] - last + head - (self.most[lane] & taken);
            open.rest[lane] = self.rest_behind_piece[lane];
            open.slots[lane] = open.slots[lane].saturating_add(slots);
        }
        open
    }

    /// Places a tile that is always cut, with a piece that fills a slot. Here `blocks` is what there is room for as a piece.
    #[inline(always)]
    fn place_long(&self, mut open: State, blocks: i16) -> State {
        let all_but_one: Lane = from_fn(|lane| blocks - self.one[lane]);
        let full: Lane = from_fn(|lane| times(all_but_one[lane], self.per_block[lane]));
        let head = open.blocks.map(|blocks| blocks.max(0));
        let left: Lane = from_fn(|lane| all_but_one[lane] - full[lane] * self.most[lane] - head[lane]);
        let taken = left.map(|left| left >> 15);
        let left: Lane = from_fn(|lane| left[lane] + (self.most[lane] & taken[lane]));
        open.blocks = from_fn(|lane| self.head_behind_single[lane] - left[lane]);
        open.slots =
            from_fn(|lane| open.slots[lane].saturating_add(self.one[lane] + full[lane] + taken[lane]));
        open
    }

    /// Blocks that the room is enough for as a piece.
    #[inline(always)]
    fn head(&self, room: i16, rest: i16) -> i16 {
        room + self.over_piece + mask(rest < self.carry_from)
    }

    /// Room behind one more whole row, and its rest.
    #[inline(always)]
    fn behind_whole(&self, lane: usize, n: i16, room: i16, rest: i16) -> (i16, i16) {
        let rest = rest - self.whole_rest;
        let borrowed = rest >> 15;
        (
            room - n - self.whole_blocks[lane] + borrowed,
            rest + (self.block & borrowed),
        )
    }
}

/// 2^16 over `most`, rounded up.
#[expect(clippy::cast_possible_truncation, reason = "at most 2^15 + 1")]
#[inline]
fn per_block(most: i16) -> u16 {
    ((1_u32 << 16) / u32::from(most.unsigned_abs().max(2)) + 1) as u16
}

/// How often `most` goes into `blocks`, by the inverse of `most`.
///
/// The inverse is too large by `most / 2^16` of itself or less, and the quotient by `blocks / 2^16`. That is less than what it lacks to the next
/// whole number, `1 / most` at least, where `blocks * most` is below 2^16. Where it is not, for blocks below 2^14, the result may be one too large.
#[expect(
    clippy::cast_possible_wrap,
    reason = "the upper half of 32 bits, and hardly more than the blocks"
)]
#[inline]
fn times(blocks: i16, per_block: u16) -> i16 {
    ((u32::from(blocks.cast_unsigned()) * u32::from(per_block)) >> 16) as u16 as i16
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::{CostTable, definition};
    use super::*;

    #[test]
    fn quotients_are_exact_or_one_too_large() {
        for most in (2..300).chain([511, 512, 1000, 4096, 16_383]) {
            for blocks in (0..300)
                .chain((300..1 << 14).step_by(7))
                .chain([most - 1, most, most + 1])
            {
                let over = times(blocks, per_block(most)) - blocks / most;
                let is_wide = i32::from(blocks) * i32::from(most) >= 1 << 16;
                assert!(over == 0 || (is_wide && over == 1), "{blocks} / {most}: {over}");
            }
        }
    }

    /// The slots of a fill, or the most that a lane counts if that is less.
    fn slots(tiles: &[i128], capacity: u64, prices: &Prices) -> u64 {
        let most = i128::from(i16::MAX);
        let slots = definition::fill(tiles, capacity.into(), most, prices)
            .map_or(most, |works| works.last().map_or(1, |work| work[0] + 1));
        u64::try_from(slots).unwrap()
    }

    /// A table, tiles in blocks and capacities that are all above what a tile of one block costs.
    fn random_case(below: &mut impl FnMut(u64) -> u64) -> (CostTable, Vec<u64>, [u64; LANES]) {
        let mut up_to_power = |power: u64| {
            let end = 1 << below(power);
            below(end)
        };
        let (block, longest) = (1 + up_to_power(16), 1 + up_to_power(13));
        let scale = [1, 2, 8, 40][usize::try_from(below(4)).unwrap()] * block;
        let whole = below(scale);
        let piece = below(scale).min(whole + block);
        let shortest = 1 + [0, below(longest), longest - 1][usize::try_from(below(3)).unwrap()];
        let is_rare = below(3) == 0;
        let tiles = (0..=below(60))
            .map(|_| match below(8) {
                0 => longest,
                _ if is_rare => 1 + below(2 + longest / 30),
                _ => shortest + below(longest - shortest + 1),
            })
            .collect();
        let most = longest * block * (1 + below(4));
        let first = piece + block + whole + below(1 + most);
        let apart = below(2 * block);
        let table = CostTable {
            block_tokens: 1,
            block: u32::try_from(block).unwrap(),
            piece: u32::try_from(piece).unwrap(),
            whole: u32::try_from(whole).unwrap(),
            ..CostTable::AITER
        };
        (table, tiles, from_fn(|lane| first + lane as u64 * apart))
    }

    #[test]
    fn every_kind_of_walk_takes_the_slots_of_the_definition() {
        let mut random = Random(3);
        let mut below = |end| random.below(end);
        let mut kinds = [0; 6];
        for case in 0..6000 {
            let (table, tiles, capacities) = random_case(&mut below);
            let prices = Prices::of(&table);
            let mut kv_indptr = vec![5];
            for tile in &tiles {
                kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + i32::try_from(*tile).unwrap());
            }
            let survey = prices.survey(&kv_indptr);
            let trial = Trial {
                kv_indptr: &kv_indptr,
                capacities,
                slots: 100,
                shortest: survey.shortest,
                longest: survey.longest,
            };
            let Some(lanes) = Lanes::new(&trial, &prices) else {
                kinds[5] += 1;
                continue;
            };
            kinds[lanes.kind as usize] += 1;
            let fold = 1 + usize::try_from(below(2)).unwrap();
            let folded: Vec<i128> = tiles.iter().flat_map(|&tile| vec![tile.into(); fold]).collect();
            let expected = capacities.map(|capacity| slots(&folded, capacity, &prices));
            let kind = lanes.kind;
            assert_eq!(
                lanes.walk(&kv_indptr, fold, &prices),
                expected,
                "case {case}, {kind:?}: {table:?} {tiles:?} {trial:?}"
            );
        }
        assert!(kinds.iter().all(|&cases| cases > 50), "{kinds:?}");
    }
}

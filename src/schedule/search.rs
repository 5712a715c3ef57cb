//! The least candidate under which the balanced fill needs no more slots than there are.
//!
//! A trial of one candidate is a walk over all tiles that writes nothing; eight are tried at once where all numbers are small.

use super::balanced::CANDIDATES;
use super::kind::{LANES, Trial};
use super::lanes::Lanes;
use super::prices::{Divisor, Prices, Survey};
use super::rules::Rules;

/// So few entries make single trials cheaper than the lanes' numbers.
const FEW: usize = 5;

/// What is searched: candidates `low + j * step` for `j` in `0 .. 64`, the last of which is feasible.
#[derive(Debug)]
pub(super) struct Search<'a> {
    pub(super) kv_indptr: &'a [i32],
    pub(super) fold: usize,
    pub(super) slots: u64,
    pub(super) prices: &'a Prices,
    pub(super) low: u64,
    pub(super) step: u64,
    pub(super) rows: Survey,
    /// A candidate that no feasible one is below. Under it a tile of one block fits an empty slot.
    pub(super) from: u64,
}

impl Search<'_> {
    /// Returns the least feasible candidate; those about `near` are tried first.
    pub(super) fn least_feasible(&self, near: u64) -> u64 {
        let last = CANDIDATES - 1;
        // The last infeasible and the least feasible candidate that are known bound the answer: `from - 1` and `to`.
        let (mut from, mut to) = (self.from.min(last), last);
        if self.kv_indptr.len() <= FEW {
            return self.gallop(near, [from, to]);
        }
        let mut tried = run_of(near.saturating_sub(LANES as u64 / 2), 1, from, to);
        let mut apart = 1;
        while from < to {
            let (before, behind) = (from, to);
            let Some(run) = self.run(tried) else {
                return self.gallop(near, [from, to]);
            };
            for (candidate, used) in tried.into_iter().zip(run) {
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

    /// Walks all tiles with each of the candidates; returns the slots that they use, `None` where a number is too large for that.
    fn run(&self, candidates: [u64; LANES]) -> Option<[u64; LANES]> {
        let trial = Trial {
            kv_indptr: self.kv_indptr,
            capacities: candidates.map(|candidate| self.low + candidate * self.step),
            slots: self.slots,
            shortest: self.rows.shortest,
            longest: self.rows.longest,
        };
        let lanes = Lanes::new(&trial, self.prices)?;
        Some(lanes.walk(self.kv_indptr, self.fold, self.prices))
    }

    /// Finds what lies in `from ..= to` by single trials, the first of them at `near`.
    fn gallop(&self, near: u64, [mut from, mut to]: [u64; 2]) -> u64 {
        let mut tried = near;
        let mut apart = 1;
        while from < to {
            // In long steps for as long as they tell more than halves do.
            let halve = 2 * apart > to - from;
            tried = if halve {
                from.midpoint(to)
            } else {
                tried.clamp(from, to - 1)
            };
            if self.is_feasible(self.low + tried * self.step) {
                to = tried;
                tried = to.saturating_sub(apart);
            } else {
                from = tried + 1;
                tried += apart;
            }
            apart *= 2;
        }
        to
    }

    /// Whether the fill under `capacity` needs no more slots than there are. For numbers of any size.
    pub(super) fn is_feasible(&self, capacity: u64) -> bool {
        let rules = Rules::new(capacity, self.prices);
        // No row has as many blocks as would not fit.
        let most = rules.most.clamp(1, self.rows.longest.max(1).cast_signed());
        let per_piece = Divisor::new(u32::try_from(most).unwrap_or(u32::MAX));
        let (mut room, mut used) = (rules.fresh, 1);
        for bounds in self.kv_indptr.windows(2) {
            let blocks = rules.blocks(bounds[1] - bounds[0]);
            if blocks == 0 {
                continue;
            }
            for _ in 0..self.fold {
                if blocks <= room.blocks {
                    room = rules.behind_whole(room, blocks);
                    continue;
                }
                let head = rules.head(room).min(blocks - 1);
                if head <= 0 && blocks <= rules.fresh.blocks {
                    room = rules.behind_fresh(blocks);
                } else if head <= 0 && blocks <= most {
                    // All of it would fit as a single piece, but a row that is cut has two.
                    used += 1;
                    room = rules.behind_piece(1);
                } else if blocks <= most {
                    room = rules.behind_piece(blocks - head);
                } else {
                    // Pieces that fill a slot and blocks of the last one, were all but one block to go to fresh slots: no quotient waits
                    // for the tile before. What the open slot takes is missing from the last piece, which then may be the one before.
                    let full = per_piece.narrow((blocks - 1).cast_unsigned()).cast_signed();
                    let left = blocks - 1 - full * most - head.max(0);
                    let taken = left >> 63;
                    used += (full + taken).cast_unsigned();
                    room = rules.behind_piece(left + (most & taken) + 1);
                }
                used += 1;
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

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::{CostTable, definition};
    use super::*;

    #[test]
    fn a_single_trial_is_its_definition() {
        let mut random = Random(11);
        let mut feasible = [0; 2];
        for case in 0..20_000 {
            let (rows, spread) = (random.below(40), random.below(31));
            let most = ((1_u64 << 31) - 1) / (rows + 1);
            let mut kv_indptr = vec![0];
            for _ in 0..=rows {
                let length = random.below(most.min(1 << spread) + 1);
                kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + i32::try_from(length).unwrap());
            }
            let limit = 1 << random.below(25);
            let [block, whole, piece] =
                [1, 0, 0].map(|least| u32::try_from(least + random.below(limit)).unwrap());
            let table = CostTable {
                block_tokens: [1, 7, 16, 64][usize::try_from(random.below(4)).unwrap()],
                block,
                piece: piece.min(whole + block),
                whole,
                ..CostTable::AITER
            };
            let prices = Prices::of(&table);
            let fold = 1 + usize::try_from(random.below(3)).unwrap();
            let tiles: Vec<i128> = kv_indptr
                .windows(2)
                .map(|bounds| prices.blocks(bounds[1] - bounds[0]).into())
                .filter(|&blocks| blocks > 0)
                .flat_map(|blocks| vec![blocks; fold])
                .collect();
            let rows = prices.survey(&kv_indptr);
            let power = random.below(10);
            let slots = 1 + random.below(1 << power);
            let total: u64 = tiles
                .iter()
                .map(|&n| prices.whole + u64::try_from(n).unwrap() * prices.block)
                .sum();
            // Under it a tile of one block fits an empty slot, and so does a piece of one.
            let least = prices.whole.max(prices.piece) + prices.block;
            let capacity = (total / slots + random.below(3 * least)).max(least);
            let search = Search {
                kv_indptr: &kv_indptr,
                fold,
                slots,
                prices: &prices,
                low: 0,
                step: 1,
                rows,
                from: 0,
            };
            let expected = definition::fill(&tiles, capacity.into(), slots.into(), &prices).is_some();
            feasible[usize::from(expected)] += 1;
            assert_eq!(
                search.is_feasible(capacity),
                expected,
                "case {case}: {table:?} {capacity} {slots} {tiles:?}"
            );
        }
        assert!(feasible.iter().all(|&cases| cases > 2000), "{feasible:?}");
    }

    #[test]
    fn lanes_find_what_a_scan_of_single_trials_finds() {
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
                rows: prices.survey(&kv_indptr),
                from: if live().any(|n| n == 1) {
                    (prices.whole + prices.block).saturating_sub(low).div_ceil(step)
                } else {
                    0
                },
            };
            let is_feasible = |&candidate: &u64| search.is_feasible(low + candidate * step);
            let expected = (search.from.min(CANDIDATES - 1)..CANDIDATES)
                .find(is_feasible)
                .unwrap();
            for near in [0, expected.saturating_sub(1), expected, 30, 63, 1000] {
                let all = [search.from.min(CANDIDATES - 1), CANDIDATES - 1];
                let found = [search.least_feasible(near), search.gallop(near, all)];
                assert_eq!(found, [expected; 2], "case {case}, {near}: {table:?}");
            }
        }
    }
}

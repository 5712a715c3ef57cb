//! The balanced schedule: the shortest longest slot among those that keep the rows in order, up to a small step.
//!
//! `docs/design.md` section 6 has the definition and the proofs of what is relied on here: what is feasible under a
//! capacity is feasible under a larger one, and the largest candidate is feasible.

use super::EmptyRows;
use super::Variant;
use super::demand::Demand;
use super::prices::Prices;
use super::search::Search;
use super::sink::{Placer, Sink, Writer};
use super::walk::Walk;

/// Candidates for the capacity of a slot.
pub(super) const CANDIDATES: u64 = 64;

/// Returns the cost that every slot is filled up to, `None` for aiter's own walk, where that
/// ends earlier than the fill would, or cuts nothing and ends no later than the fill and `cut`.
///
/// `hint` is what was found for the batch before, if any, and becomes what is found for this one. It says where to look first:
/// the result does not depend on it.
pub(super) fn capacity(
    kv_indptr: &[i32],
    fold: usize,
    demand: &Demand,
    prices: &Prices,
    hint: &mut Option<u64>,
) -> Option<u64> {
    let slots = demand.num_slots as u64;
    if slots == 0 {
        return None;
    }
    let Prices {
        block, piece, whole, ..
    } = *prices;
    let rows = prices.survey(kv_indptr);
    let blocks = rows.blocks * fold as u64;
    let total = blocks * block + demand.live_tiles * whole;
    let low = total.div_ceil(slots).max(piece + block);
    let span = whole.max(2 * piece) + block + piece.saturating_sub(whole);
    let step = span.div_ceil(CANDIDATES - 1).max(1);
    // Some slot takes as many blocks as the mean, in works of which one at least is paid for.
    let mean = piece.min(whole) + blocks.div_ceil(slots) * block;
    // A tile of one block cannot be cut.
    let single = if rows.has_single { whole + block } else { 0 };
    let candidate = |cost: u64| cost.saturating_sub(low).div_ceil(step);
    let search = Search {
        kv_indptr,
        fold,
        slots,
        prices,
        low,
        step,
        total,
        longest: rows.longest,
        has_single: rows.has_single,
        from: candidate(mean.max(single)),
    };
    let is_beaten = |cost| {
        let limits = [cost + prices.cut, cost];
        is_aiter_below(limits, kv_indptr, fold, demand.blocks_per_slot, prices)
    };
    // Then nothing that could be found is below it. Seen soon if it is not so, and saves the search where rows stay whole.
    let least = low + search.from * step;
    if is_beaten(least) {
        return None;
    }
    let first = match *hint {
        Some(cost) => candidate(cost).saturating_sub(2),
        // Few tiles have few ways to lie: the least that is possible often is.
        None if 6 * demand.live_tiles <= slots => 0,
        None => (guess(demand, prices) / step).saturating_sub(2),
    };
    let found = low + search.least_feasible(first) * step;
    *hint = Some(found);
    (found == least || !is_beaten(found)).then_some(found)
}

/// Returns about how much more than its even share a slot costs.
///
/// A boundary between slots that cuts a row costs a piece and, on average, half a block that does not fit; the first cut of a
/// row saves the difference between a whole row and a piece.
fn guess(demand: &Demand, prices: &Prices) -> u64 {
    let slots = demand.num_slots as u64;
    let saved = prices.whole.saturating_sub(prices.piece) * slots.min(demand.live_tiles) / slots;
    (prices.piece + prices.block / 2).saturating_sub(saved)
}

/// Whether every slot of aiter's walk costs less than the first limit where it cuts no tile, than the second where it does.
fn is_aiter_below(
    [uncut, cut]: [u64; 2],
    kv_indptr: &[i32],
    fold: usize,
    blocks_per_slot: i64,
    prices: &Prices,
) -> bool {
    let bill = Bill {
        prices,
        slot: 0,
        longest: 0,
        limit: uncut,
        limit_cut: cut,
    };
    let mut walk = Walk::new(bill, blocks_per_slot, Variant::Parallel, EmptyRows::Skip);
    for bounds in kv_indptr.windows(2).filter(|bounds| bounds[0] < bounds[1]) {
        for _ in 0..fold {
            walk.place_live(0, bounds[0], bounds[1]);
            if walk.sink.longest >= walk.sink.limit {
                return false;
            }
        }
    }
    true
}

/// Sums up what the works of each slot cost.
#[derive(Debug)]
struct Bill<'a> {
    prices: &'a Prices,
    slot: u64,
    longest: u64,
    /// What no slot may reach: `limit_cut` once a tile was cut, which is not above what it was before.
    limit: u64,
    limit_cut: u64,
}

impl Bill<'_> {
    #[inline]
    fn add(&mut self, fixed: u64, tokens: i32) {
        self.slot += fixed + self.prices.blocks(tokens) * self.prices.block;
        self.longest = self.longest.max(self.slot);
    }
}

impl Sink for Bill<'_> {
    #[inline]
    fn whole(&mut self, _tile: i32, start: i32, end: i32) {
        self.add(self.prices.whole, end - start);
    }

    #[inline]
    fn piece(&mut self, _tile: i32, from: i32, to: i32, _end: i32) {
        self.limit = self.limit_cut;
        self.add(self.prices.piece, to - from);
    }

    #[inline]
    fn open_slot(&mut self) {
        self.slot = 0;
    }
}

/// The fill under a capacity that is feasible, written out.
#[derive(Debug)]
pub(super) struct Balanced<'a> {
    pub(super) writer: Writer<'a>,
    prices: Prices,
    capacity: u64,
    /// Blocks of a piece that fills a slot, and their tokens: those that a row may have, for where they are more no row is cut.
    most: u64,
    most_tokens: i32,
    room: u64,
}

impl<'a> Balanced<'a> {
    pub(super) fn new(writer: Writer<'a>, capacity: u64, prices: &Prices) -> Self {
        let most = prices.most(capacity);
        Self {
            writer,
            prices: *prices,
            capacity,
            most,
            most_tokens: i32::try_from(most.saturating_mul(prices.block_tokens())).unwrap_or(i32::MAX),
            room: capacity,
        }
    }

    /// Places a row in two or more pieces: `head` blocks into the open slot, the others into fresh slots.
    #[inline]
    fn cut(&mut self, tile: i32, start: i32, end: i32, blocks: u64, head: u64) {
        let (mut left, mut from) = (blocks, start);
        if head > 0 {
            from = start + self.prices.tokens(head);
            self.writer.piece(tile, start, from, end);
            left -= head;
        } else if blocks <= self.most {
            // It would fit as a single piece, but a row that is cut has two.
            self.writer.open_slot();
            from = start + self.prices.tokens(blocks - 1);
            self.writer.piece(tile, start, from, end);
            left = 1;
        }
        while left > self.most {
            self.writer.open_slot();
            let to = from + self.most_tokens;
            self.writer.piece(tile, from, to, end);
            from = to;
            left -= self.most;
        }
        // The last block may be short, so the end of the row is not `from` plus whole blocks.
        self.writer.open_slot();
        self.writer.piece(tile, from, end, end);
        self.room = self.capacity - self.prices.piece - left * self.prices.block;
    }
}

impl Placer for Balanced<'_> {
    #[inline]
    fn place(&mut self, tile: i32, start: i32, end: i32) {
        let blocks = self.prices.blocks(end - start);
        let cost = self.prices.whole + blocks * self.prices.block;
        if cost <= self.room {
            self.writer.whole(tile, start, end);
            self.room -= cost;
            return;
        }
        let head = self.prices.most(self.room).min(blocks - 1);
        if head == 0 && cost <= self.capacity {
            self.writer.open_slot();
            self.writer.whole(tile, start, end);
            self.room = self.capacity - cost;
        } else {
            self.cut(tile, start, end, blocks, head);
        }
    }

    #[inline]
    fn num_partials(&self) -> i32 {
        self.writer.num_partials()
    }

    fn finish(self) -> (usize, usize) {
        self.writer.finish()
    }
}

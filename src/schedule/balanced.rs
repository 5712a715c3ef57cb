//! The balanced schedule: the shortest longest slot among those that keep the rows in order, up to a small step.
//!
//! `docs/design.md` section 6 has the definition and the proofs of what is relied on here: what is feasible under a
//! capacity is feasible under a larger one, and the largest candidate is feasible.

use super::EmptyRows;
use super::Variant;
use super::cost::CostTable;
use super::demand::Demand;
use super::prices::{Divisor, Prices};
use super::search::Search;
use super::sink::{Placer, Sink, Writer};
use super::walk::Walk;

/// Candidates for the capacity of a slot.
pub(super) const CANDIDATES: u64 = 64;

/// Returns the cost that every slot is filled up to, `None` where aiter's own walk ends earlier than the fill would.
pub(super) fn capacity(kv_indptr: &[i32], fold: usize, demand: &Demand, table: &CostTable) -> Option<u64> {
    let prices = Prices::of(table);
    let slots = demand.num_slots as u64;
    if slots == 0 {
        return None;
    }
    let Prices {
        block, piece, whole, ..
    } = prices;
    let rows = prices.survey(kv_indptr);
    let total = (rows.blocks * block + rows.live * whole) * fold as u64;
    let low = total.div_ceil(slots).max(piece + block);
    let span = whole.max(2 * piece) + block + piece.saturating_sub(whole);
    let step = span.div_ceil(CANDIDATES - 1).max(1);
    // A tile of one block cannot be cut.
    let from = if rows.has_single {
        (whole + block).saturating_sub(low).div_ceil(step)
    } else {
        0
    };
    let search = Search {
        kv_indptr,
        fold,
        slots,
        prices: &prices,
        low,
        step,
        total,
        longest: rows.longest,
        from,
    };
    let least = search.least_feasible(guess(demand, fold, kv_indptr.len() - 1, &prices) / step);
    let found = low + least * step;
    let is_beaten = is_aiter_below(found, kv_indptr, fold, demand.blocks_per_slot, &prices);
    (!is_beaten).then_some(found)
}

/// Returns about how much more than its even share a slot costs.
///
/// A boundary between slots that cuts a row costs a piece and, on average, half a block that does not fit; the first cut of a
/// row saves the difference between a whole row and a piece.
fn guess(demand: &Demand, fold: usize, rows: usize, prices: &Prices) -> u64 {
    let slots = demand.num_slots as u64;
    let cut = slots.min((rows * fold) as u64);
    let saved = prices.whole.saturating_sub(prices.piece) * cut / slots;
    (prices.piece + prices.block / 2).saturating_sub(saved)
}

/// Whether every slot of aiter's walk costs less than `limit`.
fn is_aiter_below(limit: u64, kv_indptr: &[i32], fold: usize, blocks_per_slot: i64, prices: &Prices) -> bool {
    let bill = Bill {
        prices,
        slot: 0,
        longest: 0,
    };
    let mut walk = Walk::new(bill, blocks_per_slot, Variant::Parallel, EmptyRows::Skip);
    for bounds in kv_indptr.windows(2).filter(|bounds| bounds[0] < bounds[1]) {
        for _ in 0..fold {
            walk.place_live(0, bounds[0], bounds[1]);
            if walk.sink.longest >= limit {
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
        self.add(self.prices.piece, to - from);
    }

    #[inline]
    fn open_slot(&mut self) {
        self.slot = 0;
    }
}

/// The fill under a capacity that is feasible, written out.
///
/// The room of the open slot less `piece` is kept as whole blocks, which may be negative, and a rest below a block: then a
/// cut needs no division, and what it leaves is the same rest each time.
#[derive(Debug)]
pub(super) struct Balanced<'a> {
    pub(super) writer: Writer<'a>,
    tokens: Divisor,
    block: i64,
    whole: Cost,
    /// What a whole row costs more than a piece; negative where it costs less.
    more: Cost,
    empty: Cost,
    after_piece: Cost,
    after_whole: Cost,
    longest_whole: i64,
    room: Cost,
}

/// Whole blocks and a rest of less than one.
#[derive(Debug, Clone, Copy)]
struct Cost {
    blocks: i64,
    rest: i64,
}

impl Cost {
    fn of(cost: i64, block: i64) -> Self {
        Self {
            blocks: cost.div_euclid(block),
            rest: cost.rem_euclid(block),
        }
    }

    /// The same with fewer blocks.
    #[inline]
    fn without(self, blocks: i64) -> Self {
        Self {
            blocks: self.blocks - blocks,
            ..self
        }
    }
}

impl<'a> Balanced<'a> {
    pub(super) fn new(writer: Writer<'a>, capacity: u64, table: &CostTable) -> Self {
        let [block, piece, whole] = [table.block, table.piece, table.whole].map(i64::from);
        let capacity = capacity.cast_signed();
        let cost = |cost| Cost::of(cost, block);
        Self {
            writer,
            tokens: Divisor::new(table.block_tokens),
            block,
            whole: cost(whole),
            more: cost(whole - piece),
            empty: cost(capacity - piece),
            after_piece: cost(capacity - 2 * piece),
            after_whole: cost(capacity - piece - whole),
            longest_whole: cost(capacity - whole).blocks,
            room: cost(capacity - piece),
        }
    }

    /// Places a row in two or more pieces: `head` blocks into the open slot, the others into fresh slots.
    #[inline]
    fn cut(&mut self, tile: i32, start: i32, end: i32, blocks: i64, head: i64) {
        let most = self.empty.blocks.min(blocks - 1);
        let mut left = blocks;
        let mut from = start;
        if head > 0 {
            from = start + self.tokens_of(head);
            self.writer.piece(tile, start, from, end);
            left -= head;
        }
        let full = self.tokens_of(most);
        while left > most {
            self.writer.open_slot();
            let to = from + full;
            self.writer.piece(tile, from, to, end);
            from = to;
            left -= most;
        }
        // The last block may be short, so the end of the row is not `from` plus whole blocks.
        self.writer.open_slot();
        self.writer.piece(tile, from, end, end);
        self.room = self.after_piece.without(left);
    }

    /// Tokens in `blocks` whole blocks that lie inside a row.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the row's length, which is an i32"
    )]
    #[inline]
    fn tokens_of(&self, blocks: i64) -> i32 {
        (blocks * self.tokens.by.cast_signed()) as i32
    }
}

impl Placer for Balanced<'_> {
    #[inline]
    fn place(&mut self, tile: i32, start: i32, end: i32) {
        let blocks = self.tokens.blocks(end - start).cast_signed();
        let Cost { blocks: room, rest } = self.room;
        if blocks + self.more.blocks + i64::from(rest < self.more.rest) <= room {
            self.writer.whole(tile, start, end);
            let rest = rest - self.whole.rest;
            let borrow = i64::from(rest < 0);
            self.room = Cost {
                blocks: room - blocks - self.whole.blocks - borrow,
                rest: rest + self.block * borrow,
            };
            return;
        }
        let head = room.min(blocks - 1);
        if head <= 0 && blocks <= self.longest_whole {
            self.writer.open_slot();
            self.writer.whole(tile, start, end);
            self.room = self.after_whole.without(blocks);
        } else {
            self.cut(tile, start, end, blocks, head);
        }
    }

    fn writer(&self) -> &Writer<'_> {
        &self.writer
    }
}

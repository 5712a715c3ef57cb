//! The balanced schedule: the shortest longest slot among those that keep the rows in order, up to a small step and what a cut costs.
//!
//! `docs/design.md` section 6 has the definition and the proofs of what is relied on here: what is feasible under a
//! capacity is feasible under a larger one, and the largest candidate is feasible.

use super::demand::{Demand, blocks_of};
use super::kind::LANES;
use super::prices::Prices;
use super::search::Search;
use super::walk::tokens_of;
use super::{BLOCK_TOKENS, OVERHEAD_BLOCKS};

/// Candidates for the capacity of a slot.
pub(super) const CANDIDATES: u64 = 64;

/// Returns the cost that every slot is filled up to, `None` for aiter's own walk where that is cheaper.
///
/// Where all tiles have as many blocks as each other it is what whole tiles cost, as many in every slot, if cutting gains less than `cut`.
///
/// `hint` is how much above an even share the cost for the batch before was, if any, and becomes that of this one. It says where to look
/// first: the result does not depend on it.
#[inline(never)]
pub(super) fn capacity(
    kv_indptr: &[i32],
    fold: usize,
    demand: Demand,
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
    let single = if rows.shortest == 1 { whole + block } else { 0 };
    let candidate = |cost: u64| cost.saturating_sub(low).div_ceil(step);
    let mut search = Search {
        kv_indptr,
        fold,
        slots,
        prices,
        low,
        step,
        rows,
        from: candidate(mean.max(single)),
    };
    // What a fill costs that cuts tiles includes `cut`.
    let is_beaten = |cost: u64| {
        let limits = [cost, cost.saturating_sub(prices.cut)];
        is_aiter_below(limits, kv_indptr, fold, demand.blocks_per_slot, prices)
    };
    let whole_tiles = (rows.shortest == rows.longest)
        .then(|| demand.live_tiles.div_ceil(slots) * (whole + rows.longest * block));
    // Nothing that could be found is below it.
    let least = low + search.from * step;
    if let Some(cost) = whole_tiles.filter(|&cost| cost < least + prices.cut) {
        return (!is_beaten(cost)).then_some(cost);
    }
    // Seen soon if it is not so, and saves the search where rows stay whole.
    if is_beaten(least + prices.cut) {
        return None;
    }
    // Few tiles have few ways to lie: the least that is possible is often X, or close to it. Otherwise that is likely if it was X, or more than
    // X, for the batch before.
    let hinted = hint.map(|over| over / step);
    let is_likely =
        6 * demand.live_tiles <= slots || hinted.is_some_and(|candidate| candidate <= search.from);
    let found = if is_likely && search.is_feasible(least) {
        least
    } else {
        let near = if is_likely {
            search.from += 1;
            hinted.unwrap_or(0).max(search.from + LANES as u64 / 2)
        } else {
            hinted.unwrap_or_else(|| guess(&demand, prices) / step)
        };
        low + search.least_feasible(near) * step
    };
    *hint = Some(found - low);
    match whole_tiles.filter(|&cost| cost < found + prices.cut) {
        Some(cost) => (!is_beaten(cost)).then_some(cost),
        None => (found == least || !is_beaten(found + prices.cut)).then_some(found),
    }
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
///
/// The second is not above the first. Of a tile that is cut the pieces that fill a slot cost the same, so one of them is looked at.
fn is_aiter_below(
    [uncut, cut]: [u64; 2],
    kv_indptr: &[i32],
    fold: usize,
    blocks_per_slot: i64,
    prices: &Prices,
) -> bool {
    let share_tokens = i32::try_from(blocks_per_slot * i64::from(BLOCK_TOKENS)).unwrap_or(i32::MAX);
    let (mut room, mut slot, mut longest, mut limit) = (blocks_per_slot, 0, 0, uncut);
    for bounds in kv_indptr.windows(2).filter(|bounds| bounds[0] < bounds[1]) {
        let tokens = bounds[1] - bounds[0];
        let blocks = i64::from(blocks_of(tokens));
        for _ in 0..fold {
            if room <= 0 {
                (room, slot) = (blocks_per_slot, 0);
            }
            if blocks <= room {
                room -= blocks + OVERHEAD_BLOCKS;
                slot += prices.work(tokens, true);
            } else {
                let head = tokens_of(room);
                let full = (blocks - room - 1) / blocks_per_slot;
                let last = blocks - room - full * blocks_per_slot;
                limit = cut;
                longest = longest.max(slot + prices.work(head, false));
                if full > 0 {
                    longest = longest.max(prices.work(share_tokens, false));
                }
                slot = prices.work(tokens - head - tokens_of(full * blocks_per_slot), false);
                room = blocks_per_slot - last - OVERHEAD_BLOCKS;
            }
            longest = longest.max(slot);
            if longest >= limit {
                return false;
            }
        }
    }
    true
}

//! What a slot has room for under a capacity, counted in blocks.

use super::prices::{Parts, Prices};

/// What follows from the table and the capacity.
///
/// What a slot has room for is kept as `whole + g * block + f` with `0 <= f < block`: a row of `n` blocks is whole where `n` is at most `g`, and
/// from one row to the next there is neither a product nor a quotient to wait for.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) prices: Prices,
    pub(super) block: i64,
    /// Room of an empty slot, of one behind a row of no blocks, and of one behind a piece of none.
    pub(super) fresh: Parts,
    behind_fresh: Parts,
    behind_piece: Parts,
    /// What a whole row costs beside its blocks, also in blocks.
    pub(super) whole_cost: i64,
    whole: Parts,
    /// How many blocks more a piece may have than a whole row, for a rest below `carry_from`; one more for others.
    over_piece: i64,
    carry_from: i64,
    /// Blocks of a piece that fills a slot, and their tokens: those that a row may have, for where they are more no row is cut.
    pub(super) most: i64,
    pub(super) most_tokens: i32,
}

impl Rules {
    #[inline]
    pub(super) fn new(capacity: u64, prices: &Prices) -> Self {
        let [capacity, piece, whole] = [capacity, prices.piece, prices.whole].map(u64::cast_signed);
        let most = prices.parts(capacity - piece).blocks;
        let most_tokens = most.saturating_mul(prices.block_tokens().cast_signed());
        let most_tokens = i32::try_from(most_tokens).unwrap_or(i32::MAX);
        let over_piece = prices.parts(whole - piece);
        Self {
            prices: *prices,
            block: prices.block.cast_signed(),
            fresh: prices.parts(capacity - whole),
            behind_fresh: prices.parts(capacity - 2 * whole),
            behind_piece: prices.parts(capacity - piece - whole),
            whole_cost: whole,
            whole: prices.parts(whole),
            over_piece: over_piece.blocks,
            carry_from: prices.block.cast_signed() - over_piece.rest,
            most,
            most_tokens,
        }
    }

    #[inline]
    pub(super) fn blocks(&self, tokens: i32) -> i64 {
        self.prices.blocks(tokens).cast_signed()
    }

    /// Room behind one more whole row.
    #[inline]
    pub(super) fn behind_whole(&self, room: Parts, blocks: i64) -> Parts {
        let rest = room.rest - self.whole.rest;
        let borrowed = rest >> 63;
        Parts {
            blocks: room.blocks - (blocks + self.whole.blocks - borrowed),
            rest: rest + (self.block & borrowed),
        }
    }

    /// Room behind a whole row in a fresh slot.
    #[inline]
    pub(super) fn behind_fresh(&self, blocks: i64) -> Parts {
        Parts {
            blocks: self.behind_fresh.blocks - blocks,
            rest: self.behind_fresh.rest,
        }
    }

    /// Room behind a piece in a fresh slot.
    #[inline]
    pub(super) fn behind_piece(&self, blocks: i64) -> Parts {
        Parts {
            blocks: self.behind_piece.blocks - blocks,
            rest: self.behind_piece.rest,
        }
    }

    /// Blocks of a piece that the room is enough for, 0 or less for none.
    #[inline]
    pub(super) fn head(&self, room: Parts) -> i64 {
        room.blocks + self.over_piece + i64::from(room.rest >= self.carry_from)
    }
}

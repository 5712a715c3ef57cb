//! Pieces that depend on their row alone, dealt out to the slots by cost.

use super::cost::CostTable;
use super::prices::{Divisor, Prices};
use super::sink::{Placer, Writer};
use super::to_i64;

/// Cuts every row into pieces of the same number of tokens.
///
/// With `c` the cost of what comes before a piece, `T` that of all and `C` compute units, the piece's slot is
/// `floor(c C / T)`: the last `s` with `c >= ceil(s T / C)`. That bound is kept for the next slot. From one slot to the next it
/// grows by `T / C`, rounded down, and by one more whenever what was rounded away so far adds up to that.
#[derive(Debug)]
pub(super) struct Invariant<'a> {
    pub(super) writer: Writer<'a>,
    prices: Prices,
    piece_tokens: i32,
    /// Cost of a piece of that many tokens.
    full_piece: u64,
    /// Cost of the pieces so far.
    before: u64,
    /// Cost from which on a piece is a later slot's: `ceil(s T / C)`.
    next_slot_at: u64,
    /// `T` as a share of each unit and a rest, and the number of units.
    share: u64,
    rest: i64,
    num_cus: i64,
    /// `s * rest` less a multiple of the units, above `-num_cus` and at most 0.
    owed: i64,
}

impl<'a> Invariant<'a> {
    pub(super) fn new(
        writer: Writer<'a>,
        kv_indptr: &[i32],
        fold: usize,
        num_cus: usize,
        table: &CostTable,
        piece_tokens: i32,
    ) -> Self {
        let prices = Prices::of(table);
        let full_piece = prices.work(piece_tokens, false);
        let by_piece = Divisor::new(piece_tokens.unsigned_abs());
        let row_cost = |bounds: &[i32]| match bounds[1] - bounds[0] {
            0 => 0,
            length if length <= piece_tokens => prices.work(length, true),
            length => {
                let full = by_piece.blocks(length) - 1;
                // Less than `length`, so it fits.
                let before = i32::try_from(full * by_piece.by).unwrap_or(0);
                full * full_piece + prices.work(length - before, false)
            }
        };
        let total = kv_indptr.windows(2).map(row_cost).sum::<u64>() * fold as u64;
        let mut made = Self {
            writer,
            prices,
            piece_tokens,
            full_piece,
            before: 0,
            next_slot_at: 0,
            share: total / num_cus as u64,
            rest: (total % num_cus as u64).cast_signed(),
            num_cus: to_i64(num_cus),
            owed: 0,
        };
        made.next_slot();
        made
    }

    /// Moves the bound on by one slot.
    #[inline]
    fn next_slot(&mut self) {
        self.next_slot_at += self.share;
        self.owed += self.rest;
        if self.owed > 0 {
            self.next_slot_at += 1;
            self.owed -= self.num_cus;
        }
    }

    /// Opens slots up to that of the next piece.
    #[inline]
    fn turn_to_slot(&mut self) {
        while self.before >= self.next_slot_at {
            self.writer.open_slot();
            self.next_slot();
        }
    }
}

impl Placer for Invariant<'_> {
    #[inline]
    fn place(&mut self, tile: i32, start: i32, end: i32) {
        if end - start <= self.piece_tokens {
            self.turn_to_slot();
            self.writer.whole(tile, start, end);
            self.before += self.prices.work(end - start, true);
            return;
        }
        let mut from = start;
        while end - from > self.piece_tokens {
            let to = from + self.piece_tokens;
            self.turn_to_slot();
            self.writer.piece(tile, from, to, end);
            self.before += self.full_piece;
            from = to;
        }
        self.turn_to_slot();
        self.writer.piece(tile, from, end, end);
        self.before += self.prices.work(end - from, false);
    }

    #[inline]
    fn num_partials(&self) -> i32 {
        self.writer.num_partials()
    }

    fn finish(self) -> (usize, usize) {
        self.writer.finish()
    }
}

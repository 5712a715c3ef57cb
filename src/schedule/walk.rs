//! aiter's walk: one pass over the rows, filling slots to an even number of blocks.

use super::demand::blocks_of;
use super::sink::{Placer, Writer};
use super::{BLOCK_TOKENS, EmptyRows, OVERHEAD_BLOCKS, Variant};

/// Where the walk is.
///
/// aiter counts what is left of a slot's payload of `blocks_per_slot + 16` blocks, a row costing 16 blocks beside its
/// own in each slot. Carried here is `room`, that number less 16: the blocks that the slot may still take of one row.
/// Nothing else about the slot matters, and for a row that is not empty neither does how far below 0 it is.
///
/// The walk ends inside the slots it was given. With `s` slots before the current one and a capacity of `c`, the rows
/// so far cost at least `s * c + (c - 16 - room)`: equal at the start, kept by a row that fits, and kept or raised by a row
/// that opens slots. A newly opened slot therefore has more than `s * c` behind it, and all rows together cost no more
/// than `num_slots * c`. Each slot opened adds at most one work, so there are at most `tiles + num_slots - 1` of them.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    writer: Writer<'a>,
    blocks_per_slot: i64,
    room: i64,
    /// What an empty row gets; `None` for nothing.
    empty: Option<Variant>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        writer: Writer<'a>,
        blocks_per_slot: i64,
        variant: Variant,
        empty_rows: EmptyRows,
    ) -> Self {
        Self {
            writer,
            blocks_per_slot,
            room: blocks_per_slot,
            empty: (empty_rows == EmptyRows::Aiter).then_some(variant),
        }
    }

    /// Places a row that is not empty.
    #[inline]
    fn place_live(&mut self, tile: i32, start: i32, end: i32) {
        let blocks = i64::from(blocks_of(end - start));
        if blocks <= self.room {
            self.writer.whole(tile, start, end);
            self.room -= blocks + OVERHEAD_BLOCKS;
        } else if self.room <= 0 && blocks <= self.blocks_per_slot {
            self.open_slot();
            self.writer.whole(tile, start, end);
            self.room -= blocks + OVERHEAD_BLOCKS;
        } else {
            self.cut(tile, start, end, blocks);
        }
    }

    /// Places a row in two or more pieces: what the current slot has room for, then fresh slots.
    #[inline]
    fn cut(&mut self, tile: i32, start: i32, end: i32, blocks: i64) {
        let mut left = blocks;
        let mut from = start;
        loop {
            if self.room <= 0 {
                self.open_slot();
            }
            let taken = left.min(self.room);
            left -= taken;
            // The last block may be short, so the end of the row is not `from` plus whole blocks.
            let to = if left == 0 { end } else { from + tokens_of(taken) };
            self.writer.piece(tile, from, to, end);
            self.room -= taken + OVERHEAD_BLOCKS;
            if left == 0 {
                return;
            }
            from = to;
        }
    }

    #[inline]
    fn open_slot(&mut self) {
        self.writer.open_slot();
        self.room = self.blocks_per_slot;
    }
}

impl Placer for Walk<'_> {
    #[inline]
    fn place(&mut self, tile: i32, start: i32, end: i32) {
        self.place_live(tile, start, end);
    }

    /// The way aiter places a row of length 0.
    fn place_empty(&mut self, tile: i32, position: i32) {
        let Some(variant) = self.empty else { return };
        if self.room < 0 {
            if variant == Variant::Parallel {
                return;
            }
            self.open_slot();
        }
        self.writer.whole(tile, position, position);
        self.room -= OVERHEAD_BLOCKS;
    }

    #[inline]
    fn num_partials(&self) -> i32 {
        self.writer.num_partials()
    }

    fn finish(self) -> (usize, usize) {
        self.writer.finish()
    }
}

/// Tokens in `blocks` whole blocks that lie inside a row.
#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the row's length, which is an i32"
)]
#[inline]
pub(super) fn tokens_of(blocks: i64) -> i32 {
    blocks as i32 * BLOCK_TOKENS
}

//! The fill of `balanced` under a capacity that is feasible, written out.

use super::WORK_WORDS;
use super::prices::{Parts, Prices};
use super::sink::{Writer, narrow};

/// Half a work.
type Half = [i32; WORK_WORDS / 2];

/// What follows from the table and the capacity.
///
/// What a slot has room for is kept as `whole + g * block + f` with `0 <= f < block`: a row of `n` blocks is whole where `n` is at most `g`, and
/// from one row to the next there is neither a product nor a quotient to wait for.
#[derive(Debug)]
struct Rules {
    prices: Prices,
    block: i64,
    /// Room of an empty slot, and of one behind a piece of no blocks.
    fresh: Parts,
    behind_piece: Parts,
    /// What a whole row costs beside its blocks, and what of that it costs more than a piece.
    whole: Parts,
    over_piece: Parts,
    /// Blocks of a piece that fills a slot, and their tokens: those that a row may have, for where they are more no row is cut.
    most: i64,
    most_tokens: i32,
    /// What is added to the halves of a work for the next row, and for the next piece that fills a slot.
    next_row: Half,
    next_piece: Half,
    next_range: Half,
}

impl Rules {
    #[inline]
    fn new(capacity: u64, prices: &Prices) -> Self {
        let [capacity, piece, whole] = [capacity, prices.piece, prices.whole].map(u64::cast_signed);
        let most = prices.parts(capacity - piece).blocks;
        let most_tokens = most.saturating_mul(prices.block_tokens().cast_signed());
        let most_tokens = i32::try_from(most_tokens).unwrap_or(i32::MAX);
        Self {
            prices: *prices,
            block: prices.block.cast_signed(),
            fresh: prices.parts(capacity - whole),
            behind_piece: prices.parts(capacity - piece - whole),
            whole: prices.parts(whole),
            over_piece: prices.parts(whole - piece),
            most,
            most_tokens,
            next_row: [1, 0, 1, 1],
            next_piece: [0, 1, 0, 0],
            next_range: [most_tokens, most_tokens, -most_tokens, 0],
        }
    }

    #[inline]
    fn blocks(&self, tokens: i32) -> i64 {
        self.prices.blocks(tokens).cast_signed()
    }

    /// Room behind one more whole row.
    #[inline]
    fn behind_whole(&self, room: Parts, blocks: i64) -> Parts {
        let rest = room.rest - self.whole.rest;
        let borrowed = rest >> 63;
        Parts {
            blocks: room.blocks - (blocks + self.whole.blocks - borrowed),
            rest: rest + (self.block & borrowed),
        }
    }

    /// Blocks of a piece that the room is enough for, 0 or less for none.
    #[inline]
    fn head(&self, room: Parts) -> i64 {
        room.blocks + self.over_piece.blocks + i64::from(room.rest + self.over_piece.rest >= self.block)
    }
}

/// Where the fill is.
#[derive(Debug)]
struct Fill<'a> {
    writer: Writer<'a>,
    room: Parts,
}

#[expect(
    clippy::inline_always,
    reason = "out of line, all that is carried from tile to tile would go through memory"
)]
impl Fill<'_> {
    /// Places the rows from `row` on as long as they fit the open slot; returns their number.
    #[inline(always)]
    fn place_run(&mut self, rules: &Rules, kv_indptr: &[i32], row: usize, reduce_ends: &mut [i32]) -> usize {
        let origin = kv_indptr[0];
        let tile = narrow(row);
        let mut ids = [tile, -1, tile, tile + 1];
        let mut placed = 0;
        for (((&start, &end), work), reduce_end) in kv_indptr[row..]
            .iter()
            .zip(&kv_indptr[row + 1..])
            .zip(&mut self.writer.work_info[self.writer.num_works..])
            .zip(reduce_ends)
        {
            let blocks = rules.blocks(end - start);
            if blocks > self.room.blocks || start == end {
                break;
            }
            self.room = rules.behind_whole(self.room, blocks);
            put(work, &ids, &[start - origin, end - origin, 0, 0]);
            add(&mut ids, &rules.next_row);
            *reduce_end = self.writer.num_partials;
            placed += 1;
        }
        self.writer.num_works += placed;
        placed
    }

    /// Places a tile of so many blocks that does not fit the open slot.
    #[inline(always)]
    fn place_unfit(&mut self, rules: &Rules, tile: i32, [start, end]: [i32; 2], blocks: i64) {
        let mut head = rules.head(self.room).min(blocks - 1);
        if head <= 0 {
            self.writer.open_slot();
            if blocks <= rules.fresh.blocks {
                self.writer.whole(tile, start, end);
                self.room = rules.behind_whole(rules.fresh, blocks);
                return;
            }
            // All of it may fit as a single piece, but a row that is cut has two.
            head = rules.most.min(blocks - 1);
        }
        let mut from = start + rules.prices.tokens(head.cast_unsigned());
        self.writer.piece(tile, start, from, end);
        let mut left = blocks - head;
        if left > rules.most {
            let count;
            (count, left) = write_full_pieces(
                &mut self.writer.work_info[self.writer.num_works..],
                &mut self.writer.work_indptr[self.writer.slot + 1..],
                narrow(self.writer.num_works),
                [tile, self.writer.num_partials, from, end],
                rules,
                left,
            );
            from += rules.most_tokens * narrow(count);
            self.writer.num_works += count;
            self.writer.num_partials += narrow(count);
            self.writer.slot += count;
        }
        // The last block may be short, so the end of the row is not `from` plus whole blocks.
        self.writer.open_slot();
        self.writer.piece(tile, from, end, end);
        self.room = Parts {
            blocks: rules.behind_piece.blocks - left,
            rest: rules.behind_piece.rest,
        };
    }
}

/// Places every tile and writes where the partials of each end; returns the numbers of works and partials.
#[inline(never)]
pub(super) fn write_fill(
    kv_indptr: &[i32],
    fold: usize,
    reduce_indptr: &mut [i32],
    writer: Writer<'_>,
    capacity: u64,
    prices: &Prices,
) -> (usize, usize) {
    // A sum with numbers that the compiler knows would be taken apart, and stored one by one.
    let rules = std::hint::black_box(Rules::new(capacity, prices));
    if fold == 1 {
        fill::<false>(&rules, kv_indptr, 1, reduce_indptr, writer)
    } else {
        fill::<true>(&rules, kv_indptr, fold, reduce_indptr, writer)
    }
}

#[inline(never)]
fn fill<const FOLDED: bool>(
    rules: &Rules,
    kv_indptr: &[i32],
    fold: usize,
    reduce_indptr: &mut [i32],
    writer: Writer<'_>,
) -> (usize, usize) {
    let mut fill = Fill {
        writer,
        room: rules.fresh,
    };
    reduce_indptr[0] = 0;
    let (origin, rows) = (kv_indptr[0], kv_indptr.len() - 1);
    let (reduce_ends, behind) = reduce_indptr[1..].split_at_mut(rows * fold);
    let mut row = 0;
    while row < rows {
        let bounds = [kv_indptr[row] - origin, kv_indptr[row + 1] - origin];
        let blocks = rules.blocks(bounds[1] - bounds[0]);
        if !FOLDED && blocks > 0 && blocks <= fill.room.blocks {
            row += fill.place_run(rules, kv_indptr, row, &mut reduce_ends[row..]);
            continue;
        }
        let tiles = row * fold..(row + 1) * fold;
        for (tile, reduce_end) in tiles.clone().zip(&mut reduce_ends[tiles]) {
            if FOLDED && blocks > 0 && blocks <= fill.room.blocks {
                fill.writer.whole(narrow(tile), bounds[0], bounds[1]);
                fill.room = rules.behind_whole(fill.room, blocks);
            } else if blocks > 0 {
                fill.place_unfit(rules, narrow(tile), bounds, blocks);
            }
            *reduce_end = fill.writer.num_partials;
        }
        row += 1;
    }
    behind.fill(fill.writer.num_partials);
    fill.writer.finish()
}

/// Writes the pieces of a tile that fill a slot each, from `from` on, while more than that is left; returns their number and what is left.
#[inline(never)]
fn write_full_pieces(
    works: &mut [[i32; WORK_WORDS]],
    starts: &mut [i32],
    first: i32,
    [tile, partial, from, end]: [i32; 4],
    rules: &Rules,
    mut left: i64,
) -> (usize, i64) {
    let to = from + rules.most_tokens;
    let (mut ids, mut range) = ([tile, partial, tile, tile + 1], [from, to, end - to, 0]);
    let mut count = 0;
    for ((work, start), num_works) in works.iter_mut().zip(starts).zip(first..) {
        put(work, &ids, &range);
        *start = num_works;
        count += 1;
        left -= rules.most;
        if left <= rules.most {
            break;
        }
        add(&mut ids, &rules.next_piece);
        add(&mut range, &rules.next_range);
    }
    (count, left)
}

#[inline]
fn put(work: &mut [i32; WORK_WORDS], ids: &Half, range: &Half) {
    work[..WORK_WORDS / 2].copy_from_slice(ids);
    work[WORK_WORDS / 2..].copy_from_slice(range);
}

#[inline]
fn add(half: &mut Half, step: &Half) {
    for (word, step) in half.iter_mut().zip(step) {
        *word += step;
    }
}

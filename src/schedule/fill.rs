//! The fill of `balanced` under a capacity that is feasible, written out.

use std::hint::black_box;
use std::mem::take;
use std::slice::IterMut;

use super::WORK_WORDS;
use super::prices::{Parts, Prices};
use super::rules::Rules;
use super::sink::{Placer, Writer, narrow, place_all};

/// Rows per slot from which on those that fit the open slot are so many that a loop of their own is worth its call.
const LONG_RUN: usize = 4;

/// Half a work.
type Half = [i32; WORK_WORDS / 2];

/// What is added to the first half of a work.
#[derive(Debug)]
struct Steps {
    next_tile: Half,
    next_piece: Half,
}

impl Steps {
    /// A sum with numbers that the compiler knows would be taken apart, and stored one by one.
    #[inline]
    fn new() -> Self {
        black_box(Self {
            next_tile: [1, 0, 1, 1],
            next_piece: [0, 1, 0, 0],
        })
    }
}

/// Where the fill is.
#[derive(Debug)]
struct Fill<'a> {
    rules: &'a Rules,
    works: IterMut<'a, [i32; WORK_WORDS]>,
    /// Where the first work of each slot that is still to be opened goes.
    starts: IterMut<'a, i32>,
    room: Parts,
    /// The first half of the next piece.
    ids: Half,
    steps: Steps,
    num_works: i32,
    num_partials: i32,
    /// Whether something had no room. A panic in place of it would keep the compiler from holding `ids` in one register.
    is_over: bool,
}

#[expect(
    clippy::inline_always,
    reason = "out of line, all that is carried from tile to tile would go through memory"
)]
impl<'a> Fill<'a> {
    fn new(rules: &'a Rules, writer: Writer<'a>) -> Self {
        let Writer {
            work_indptr,
            work_info,
            ..
        } = writer;
        Self {
            rules,
            works: work_info.iter_mut(),
            starts: work_indptr[1..].iter_mut(),
            room: rules.fresh,
            ids: [0, 0, 0, 1],
            steps: Steps::new(),
            num_works: 0,
            num_partials: 0,
            is_over: false,
        }
    }

    /// The works that follow are the next slot's.
    #[inline(always)]
    fn open_slot(&mut self) {
        if let Some(start) = self.starts.next() {
            *start = self.num_works;
        } else {
            self.is_over = true;
        }
    }

    #[inline(always)]
    fn push(&mut self, ids: &Half, range: &Half, is_whole: bool) {
        if let Some(work) = self.works.next() {
            work[..WORK_WORDS / 2].copy_from_slice(ids);
            work[WORK_WORDS / 2..].copy_from_slice(range);
            if is_whole {
                work[1] = -1;
            }
        } else {
            self.is_over = true;
        }
        self.num_works += 1;
    }

    #[inline(always)]
    fn whole(&mut self, [start, end]: [i32; 2]) {
        let ids = self.ids;
        self.push(&ids, &[start, end, 0, 0], true);
    }

    /// Positions `from .. to` of a row that is cut and that ends at `end`.
    #[inline(always)]
    fn piece(&mut self, from: i32, to: i32, end: i32) {
        let ids = self.ids;
        self.push(&ids, &[from, to, end - to, 0], false);
        add(&mut self.ids, &self.steps.next_piece);
        self.num_partials += 1;
    }

    /// Places a tile that does not fit the open slot.
    #[inline(always)]
    fn place_unfit(&mut self, [start, end]: [i32; 2], blocks: i64) {
        let rules = self.rules;
        let mut head = rules.head(self.room).min(blocks - 1);
        if head <= 0 {
            self.open_slot();
            if blocks <= rules.fresh.blocks {
                self.whole([start, end]);
                self.room = rules.behind_fresh(blocks);
                return;
            }
            // All of it may fit as a single piece, but a row that is cut has two.
            head = rules.most.min(blocks - 1);
        }
        let mut from = start + rules.prices.tokens(head.cast_unsigned());
        self.piece(start, from, end);
        let mut left = blocks - head;
        while left > rules.most {
            let to = from + rules.most_tokens;
            self.open_slot();
            self.piece(from, to, end);
            (from, left) = (to, left - rules.most);
        }
        // The last block may be short, so the end of the row is not `from` plus whole blocks.
        self.open_slot();
        self.piece(from, end, end);
        self.room = rules.behind_piece(left);
    }
}

#[expect(clippy::inline_always, reason = "as above")]
impl Placer for Fill<'_> {
    #[inline(always)]
    fn place(&mut self, _tile: i32, start: i32, end: i32) {
        let blocks = self.rules.blocks(end - start);
        if blocks <= self.room.blocks {
            self.whole([start, end]);
            self.room = self.rules.behind_whole(self.room, blocks);
        } else {
            self.place_unfit([start, end], blocks);
        }
        add(&mut self.ids, &self.steps.next_tile);
    }

    #[inline(always)]
    fn place_empty(&mut self, _tile: i32, _position: i32) {
        add(&mut self.ids, &self.steps.next_tile);
    }

    #[inline(always)]
    fn num_partials(&self) -> i32 {
        self.num_partials
    }

    fn finish(self) -> (usize, usize) {
        // What is left is the end of the last slot, at least.
        let is_feasible = !self.is_over && self.starts.len() > 0;
        assert!(is_feasible, "the capacity is not feasible");
        for start in self.starts {
            *start = self.num_works;
        }
        (
            usize::try_from(self.num_works).unwrap_or(0),
            usize::try_from(self.num_partials).unwrap_or(0),
        )
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
    let rules = Rules::new(capacity, prices);
    if fold == 1 && kv_indptr.len() > LONG_RUN * writer.work_indptr.len() {
        fill_in_runs(&rules, kv_indptr, reduce_indptr, writer)
    } else {
        place_all(kv_indptr, fold, reduce_indptr, || Fill::new(&rules, writer))
    }
}

/// As [`place_all`], with a loop for the rows that fit the open slot.
#[inline(never)]
fn fill_in_runs(
    rules: &Rules,
    kv_indptr: &[i32],
    reduce_indptr: &mut [i32],
    writer: Writer<'_>,
) -> (usize, usize) {
    let mut fill = Fill::new(rules, writer);
    reduce_indptr[0] = 0;
    let (origin, rows) = (kv_indptr[0], kv_indptr.len() - 1);
    let mut row = 0;
    while row < rows {
        let works = take(&mut fill.works).into_slice();
        let reduce_ends = &mut reduce_indptr[1 + row..];
        let tile = narrow(row);
        let placed;
        (placed, fill.room) = place_run(
            rules,
            &kv_indptr[row..],
            works,
            reduce_ends,
            Run {
                origin,
                tile,
                num_partials: fill.num_partials,
                room: fill.room,
                next_tile: fill.steps.next_tile,
            },
        );
        fill.works = works[placed..].iter_mut();
        fill.num_works += narrow(placed);
        row += placed;
        if let [start, end, ..] = kv_indptr[row..] {
            let blocks = rules.blocks(end - start);
            let tile = narrow(row);
            fill.ids = [tile, fill.num_partials, tile, tile + 1];
            if blocks > 0 {
                fill.place_unfit([start - origin, end - origin], blocks);
            }
            row += 1;
            reduce_indptr[row] = fill.num_partials;
        }
    }
    reduce_indptr[rows + 1..].fill(fill.num_partials);
    fill.finish()
}

/// Where a run of rows begins.
#[derive(Debug, Clone, Copy)]
struct Run {
    origin: i32,
    tile: i32,
    num_partials: i32,
    room: Parts,
    next_tile: Half,
}

/// Places rows as long as they fit the open slot and have anything; returns their number and what room is left.
#[inline(never)]
fn place_run(
    rules: &Rules,
    kv_indptr: &[i32],
    works: &mut [[i32; WORK_WORDS]],
    reduce_ends: &mut [i32],
    run: Run,
) -> (usize, Parts) {
    let mut ids = [run.tile, -1, run.tile, run.tile + 1];
    // Here nothing waits for a product, and a cost is fewer numbers than its parts.
    let mut room = run.room.blocks * rules.block + run.room.rest;
    let mut placed = 0;
    for (((&start, &end), work), reduce_end) in
        kv_indptr.iter().zip(&kv_indptr[1..]).zip(works).zip(reduce_ends)
    {
        let blocks = rules.blocks(end - start);
        let cost = blocks * rules.block;
        if cost > room || start == end {
            break;
        }
        room -= cost + rules.whole_cost;
        work[..WORK_WORDS / 2].copy_from_slice(&ids);
        work[WORK_WORDS / 2..].copy_from_slice(&[start - run.origin, end - run.origin, 0, 0]);
        add(&mut ids, &run.next_tile);
        *reduce_end = run.num_partials;
        placed += 1;
    }
    (placed, rules.prices.parts(room))
}

#[inline]
fn add(half: &mut Half, step: &Half) {
    for (word, step) in half.iter_mut().zip(step) {
        *word += step;
    }
}

#[cfg(test)]
mod tests;

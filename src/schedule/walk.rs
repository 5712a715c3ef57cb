//! aiter's walk: one pass over the rows, filling slots to an even number of blocks.

use super::{
    BLOCK_TOKENS, EmptyRows, OVERHEAD_BLOCKS, ScheduleArrays, ScheduleCounts, ScheduleParams, Variant,
    WORK_WORDS, to_i64,
};
use crate::{Expected, PlanError, Rule};

/// Blocks that `length` tokens take, the last one perhaps not full. Cannot overflow, unlike `(length + 15) / 16`.
pub(super) fn blocks_of(length: i32) -> i32 {
    length / BLOCK_TOKENS + i32::from(length % BLOCK_TOKENS != 0)
}

/// What a batch asks of the slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub(super) tiles: usize,
    pub(super) num_slots: usize,
    pub(super) blocks_per_slot: i64,
}

impl Demand {
    /// Checks the input and sums it up.
    pub(super) fn of(kv_indptr: &[i32], params: &ScheduleParams) -> Result<Self, PlanError> {
        params.validate()?;
        let (blocks, live_rows) = sum_rows(kv_indptr)?;
        let rows = kv_indptr.len() - 1;
        let tiles = rows.saturating_mul(params.fold);
        // Works are numbered with an i32, and so are tiles.
        let max_works = to_i64(tiles).saturating_add(to_i64(params.num_cus) - 1);
        if max_works >= i64::from(i32::MAX) {
            let available = i64::from(i32::MAX) - 1;
            return Err(PlanError::Capacity {
                what: "works of the schedule",
                needed: max_works,
                available,
            });
        }
        let fold = to_i64(params.fold);
        let counted = match params.empty_rows {
            EmptyRows::Aiter => to_i64(rows) * fold,
            EmptyRows::Skip => live_rows * fold,
        };
        let num_cus = to_i64(params.num_cus);
        let num_slots = match i64::from(params.max_split_per_batch) {
            budget if budget < 0 => num_cus,
            budget => num_cus.min(budget * counted),
        };
        // Far from overflow: both products are below 2^43. No slots only where nothing is counted.
        let total = blocks * fold + OVERHEAD_BLOCKS * counted;
        let divisor = num_slots.max(1);
        let blocks_per_slot = (total + divisor - 1) / divisor;
        Ok(Self {
            tiles,
            num_slots: usize::try_from(num_slots).unwrap_or(params.num_cus),
            blocks_per_slot,
        })
    }

    /// Most works that the walk can make with all compute units in use.
    pub(super) fn max_works(&self, params: &ScheduleParams) -> usize {
        self.tiles + params.num_cus - 1
    }

    fn check_outputs(&self, params: &ScheduleParams, out: &ScheduleArrays) -> Result<(), PlanError> {
        let check = |argument, actual: usize, fits: bool, expected| {
            if fits {
                Ok(())
            } else {
                Err(PlanError::Length {
                    argument,
                    actual,
                    expected,
                })
            }
        };
        let slots = params.num_cus + 1;
        let actual = out.work_indptr.len();
        check("work_indptr", actual, actual == slots, Expected::Exactly(slots))?;
        let words = self.max_works(params).saturating_mul(WORK_WORDS);
        let actual = out.work_info.len();
        check("work_info", actual, actual >= words, Expected::AtLeast(words))?;
        let entries = self.tiles + 1;
        let actual = out.reduce_indptr.len();
        check(
            "reduce_indptr",
            actual,
            actual >= entries,
            Expected::AtLeast(entries),
        )
    }
}

/// Returns the blocks of all rows and the number of rows that are not empty.
fn sum_rows(kv_indptr: &[i32]) -> Result<(i64, i64), PlanError> {
    let argument = "kv_indptr";
    let Some((&first, ends)) = kv_indptr.split_first() else {
        return Err(PlanError::Length {
            argument,
            actual: 0,
            expected: Expected::AtLeast(1),
        });
    };
    // No branch in the loop, so that it is vectorised; what is wrong is looked up afterwards.
    let mut ordered = first >= 0;
    let mut blocks = 0_i64;
    let mut live_rows = 0_i64;
    for (&start, &end) in kv_indptr.iter().zip(ends) {
        ordered &= start <= end;
        blocks += i64::from(blocks_of(end.wrapping_sub(start)));
        live_rows += i64::from(start != end);
    }
    if ordered {
        return Ok((blocks, live_rows));
    }
    let refuse = |index, value: i32, rule| {
        Err(PlanError::Entry {
            argument,
            index,
            value: value.into(),
            rule,
        })
    };
    match kv_indptr.windows(2).position(|bounds| bounds[0] > bounds[1]) {
        Some(row) if first >= 0 => refuse(row + 1, ends[row], Rule::NotBelowPrevious(kv_indptr[row].into())),
        _ => refuse(0, first, Rule::AtLeast(0)),
    }
}

/// Writes the schedule of the rows that `kv_indptr` bounds, without allocating.
///
/// `kv_indptr` is as in [`super::schedule`]. The arrays that are the same for every schedule (`reduce_final_map`,
/// `reduce_partial_map`) are not written.
///
/// # Errors
///
/// Checked before anything is written: [`PlanError::Number`] for the parameters, [`PlanError::Length`] for an empty
/// `kv_indptr` or an output of the wrong length, [`PlanError::Entry`] for a negative or decreasing `kv_indptr`,
/// [`PlanError::Capacity`] if the works could not be numbered with 32 bits.
pub fn write_schedule(
    kv_indptr: &[i32],
    params: &ScheduleParams,
    out: &mut ScheduleArrays,
) -> Result<ScheduleCounts, PlanError> {
    let demand = Demand::of(kv_indptr, params)?;
    demand.check_outputs(params, out)?;
    Ok(walk(kv_indptr, params, &demand, out))
}

fn walk(
    kv_indptr: &[i32],
    params: &ScheduleParams,
    demand: &Demand,
    out: &mut ScheduleArrays,
) -> ScheduleCounts {
    let mut cursor = Cursor {
        work_indptr: out.work_indptr,
        work_info: out.work_info.as_chunks_mut().0,
        blocks_per_slot: demand.blocks_per_slot,
        room: demand.blocks_per_slot,
        slot: 0,
        num_works: 0,
        num_partials: 0,
    };
    cursor.work_indptr[0] = 0;
    out.reduce_indptr[0] = 0;
    let (live, behind) = out.reduce_indptr[1..].split_at_mut(demand.tiles);
    let mut reduce_ends = live.chunks_exact_mut(params.fold);
    let mut tile = 0;
    let origin = kv_indptr[0];
    for bounds in kv_indptr.windows(2) {
        let (start, end) = (bounds[0] - origin, bounds[1] - origin);
        for reduce_end in reduce_ends.next().into_iter().flatten() {
            if start < end {
                cursor.place(tile, start, end);
            } else if params.empty_rows == EmptyRows::Aiter {
                cursor.place_empty(tile, start, params.variant);
            }
            *reduce_end = cursor.num_partials;
            tile += 1;
        }
    }
    behind.fill(cursor.num_partials);
    let (num_works, num_partials) = cursor.finish();
    ScheduleCounts {
        num_works,
        num_partials,
        num_slots: demand.num_slots,
        blocks_per_slot: demand.blocks_per_slot,
    }
}

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
struct Cursor<'a> {
    work_indptr: &'a mut [i32],
    work_info: &'a mut [[i32; WORK_WORDS]],
    blocks_per_slot: i64,
    room: i64,
    slot: usize,
    num_works: usize,
    num_partials: i32,
}

impl Cursor<'_> {
    /// Places a row that is not empty.
    #[inline]
    fn place(&mut self, tile: i32, start: i32, end: i32) {
        let blocks = i64::from(blocks_of(end - start));
        if blocks <= self.room {
            self.push([tile, -1, tile, tile + 1, start, end, 0, 0]);
            self.room -= blocks + OVERHEAD_BLOCKS;
        } else if self.room <= 0 && blocks <= self.blocks_per_slot {
            self.open_slot();
            self.push([tile, -1, tile, tile + 1, start, end, 0, 0]);
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
            self.push([tile, self.num_partials, tile, tile + 1, from, to, end - to, 0]);
            self.num_partials += 1;
            self.room -= taken + OVERHEAD_BLOCKS;
            if left == 0 {
                return;
            }
            from = to;
        }
    }

    /// Places a row of length 0 the way aiter does.
    fn place_empty(&mut self, tile: i32, position: i32, variant: Variant) {
        if self.room < 0 {
            if variant == Variant::Parallel {
                return;
            }
            self.open_slot();
        }
        self.push([tile, -1, tile, tile + 1, position, position, 0, 0]);
        self.room -= OVERHEAD_BLOCKS;
    }

    #[inline]
    fn push(&mut self, work: [i32; WORK_WORDS]) {
        self.work_info[self.num_works] = work;
        self.num_works += 1;
    }

    #[inline]
    fn open_slot(&mut self) {
        self.slot += 1;
        self.work_indptr[self.slot] = narrow(self.num_works);
        self.room = self.blocks_per_slot;
    }

    /// Ends the last slot and leaves the ones behind it empty; returns the numbers of works and partials.
    fn finish(self) -> (usize, usize) {
        self.work_indptr[self.slot + 1..].fill(narrow(self.num_works));
        (self.num_works, usize::try_from(self.num_partials).unwrap_or(0))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "the number of works was checked to fit before the walk"
)]
#[inline]
fn narrow(num_works: usize) -> i32 {
    num_works as i32
}

/// Tokens in `blocks` whole blocks that lie inside a row.
#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the row's length, which is an i32"
)]
#[inline]
fn tokens_of(blocks: i64) -> i32 {
    blocks as i32 * BLOCK_TOKENS
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: ScheduleParams = ScheduleParams {
        num_cus: 4,
        max_split_per_batch: -1,
        fold: 2,
        variant: Variant::Serial,
        empty_rows: EmptyRows::Skip,
    };

    fn write(
        kv_indptr: &[i32],
        params: &ScheduleParams,
        lens: [usize; 3],
    ) -> (Vec<Vec<i32>>, Result<(), PlanError>) {
        let mut arrays = lens.map(|len| vec![-7; len]);
        let [work_indptr, work_info, reduce_indptr] = &mut arrays;
        let result = write_schedule(
            kv_indptr,
            params,
            &mut ScheduleArrays {
                work_indptr,
                work_info,
                reduce_indptr,
            },
        );
        (arrays.into(), result.map(|_| ()))
    }

    #[test]
    fn nothing_is_written_when_something_is_refused() {
        let good = [5, 7 * WORK_WORDS, 5];
        assert!(write(&[0, 3, 9], &PARAMS, good).1.is_ok());
        let refused: [(&[i32], [usize; 3]); 9] = [
            (&[], good),
            (&[-1, 3, 9], good),
            (&[0, 3, 2], good),
            (&[3, 0, 2], good),
            (&[0, 3, 9], [4, good[1], good[2]]),
            (&[0, 3, 9], [6, good[1], good[2]]),
            (&[0, 3, 9], [good[0], good[1] - 1, good[2]]),
            (&[0, 3, 9], [good[0], good[1], good[2] - 1]),
            (&[0, 3, 9], [0, 0, 0]),
        ];
        for (kv_indptr, lens) in refused {
            let (arrays, result) = write(kv_indptr, &PARAMS, lens);
            assert!(result.is_err(), "{kv_indptr:?} {lens:?}");
            assert!(
                arrays.iter().flatten().all(|&entry| entry == -7),
                "{kv_indptr:?} {lens:?}"
            );
        }
    }

    #[test]
    fn errors_name_the_entry() {
        let (_, result) = write(&[4, 4, 9, 8], &PARAMS, [5, 100, 100]);
        let message = result.unwrap_err().to_string();
        assert_eq!(
            message,
            "kv_indptr[3] is 8, must not be less than the entry before it, 9"
        );
        let (_, result) = write(&[-4, 4], &PARAMS, [5, 100, 100]);
        assert_eq!(
            result.unwrap_err().to_string(),
            "kv_indptr[0] is -4, must be at least 0"
        );
    }

    #[test]
    fn tails_are_filled_or_left_alone_as_documented() {
        let (arrays, result) = write(&[0, 3, 9], &PARAMS, [5, 100, 9]);
        assert_eq!(result, Ok(()));
        assert_eq!(arrays[0].last(), Some(&4));
        assert!(arrays[1][4 * WORK_WORDS..].iter().all(|&entry| entry == -7));
        assert_eq!(arrays[2], [0; 9]);
    }

    #[test]
    fn no_rows_is_an_empty_schedule() {
        for budget in [-1, 1, 16] {
            let params = ScheduleParams {
                max_split_per_batch: budget,
                ..PARAMS
            };
            for kv_indptr in [&[0][..], &[7], &[7, 7, 7]] {
                let (arrays, result) = write(kv_indptr, &params, [5, 7 * WORK_WORDS, 8]);
                assert_eq!(result, Ok(()));
                assert_eq!((&arrays[0][..], &arrays[2][..]), (&[0; 5][..], &[0; 8][..]));
                assert!(arrays[1].iter().all(|&entry| entry == -7));
            }
        }
    }

    #[test]
    fn longest_possible_row_does_not_overflow() {
        let params = ScheduleParams {
            num_cus: 3,
            fold: 128,
            ..PARAMS
        };
        let (arrays, result) = write(&[0, i32::MAX], &params, [4, 130 * WORK_WORDS, 129]);
        assert_eq!(result, Ok(()));
        let end = usize::try_from(arrays[0][3]).unwrap() * WORK_WORDS;
        let last = &arrays[1][end - WORK_WORDS..end];
        assert_eq!(last[5..7], [i32::MAX, 0]);
    }
}

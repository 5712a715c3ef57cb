//! What a batch asks of the slots, checked before anything is written.

use super::{
    BLOCK_TOKENS, EmptyRows, OVERHEAD_BLOCKS, Policy, ScheduleArrays, ScheduleParams, WORK_WORDS, to_i64,
};
use crate::{Expected, PlanError, Rule};

/// Blocks that `length` tokens take, the last one perhaps not full. Cannot overflow, unlike `(length + 15) / 16`.
pub(super) fn blocks_of(length: i32) -> i32 {
    length / BLOCK_TOKENS + i32::from(length % BLOCK_TOKENS != 0)
}

/// Rows whose sums are taken in 32 bits.
pub(super) const CHUNK: usize = 1 << 16;

/// What a batch asks of the slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    pub(super) tiles: usize,
    /// Tiles that are not empty.
    pub(super) live_tiles: u64,
    pub(super) num_slots: usize,
    /// aiter's even share of the blocks.
    pub(super) blocks_per_slot: i64,
    /// Works that `work_info` must have room for.
    pub(super) max_works: usize,
}

impl Demand {
    /// Checks the input and sums it up.
    pub(super) fn of(kv_indptr: &[i32], params: &ScheduleParams) -> Result<Self, PlanError> {
        params.validate()?;
        let (blocks, live_rows) = sum_rows(kv_indptr)?;
        let rows = kv_indptr.len() - 1;
        let tiles = rows.saturating_mul(params.fold);
        let fold = to_i64(params.fold);
        let num_cus = to_i64(params.num_cus);
        let counted = match params.empty_rows_of_policy() {
            EmptyRows::Aiter => to_i64(rows) * fold,
            EmptyRows::Skip => live_rows * fold,
        };
        let budget = i64::from(params.max_split_per_batch);
        let mut num_slots = if budget < 0 {
            num_cus
        } else {
            num_cus.min(budget * counted)
        };
        // Each slot that a fill opens adds at most one work.
        let mut max_works = to_i64(tiles).saturating_add(num_cus - 1);
        if let Policy::Invariant { piece_tokens, .. } = params.policy {
            num_slots = num_cus;
            max_works = count_pieces(kv_indptr, piece_tokens) * fold;
        }
        // Works are numbered with an i32, and so are tiles.
        let numbered = max_works.max(to_i64(tiles));
        if numbered >= i64::from(i32::MAX) {
            let available = i64::from(i32::MAX) - 1;
            return Err(PlanError::Capacity {
                what: "works of the schedule",
                needed: numbered,
                available,
            });
        }
        // Far from overflow: both products are below 2^43. No slots only where nothing is counted.
        let total = blocks * fold + OVERHEAD_BLOCKS * counted;
        let divisor = num_slots.max(1);
        let blocks_per_slot = (total + divisor - 1) / divisor;
        Ok(Self {
            tiles,
            live_tiles: (live_rows * fold).unsigned_abs(),
            num_slots: usize::try_from(num_slots).unwrap_or(params.num_cus),
            blocks_per_slot,
            max_works: usize::try_from(max_works).unwrap_or(0),
        })
    }

    pub(super) fn check_outputs(
        &self,
        params: &ScheduleParams,
        out: &ScheduleArrays,
    ) -> Result<(), PlanError> {
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
        let words = self.max_works.saturating_mul(WORK_WORDS);
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

/// Pieces of at most `piece_tokens` tokens that the rows of an ordered `kv_indptr` make.
fn count_pieces(kv_indptr: &[i32], piece_tokens: i32) -> i64 {
    let pieces = |bounds: &[i32]| {
        i64::from(
            (bounds[1] - bounds[0])
                .unsigned_abs()
                .div_ceil(piece_tokens.unsigned_abs()),
        )
    };
    kv_indptr.windows(2).map(pieces).sum()
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
    // No branch in the loop, so that it is vectorised; what is wrong is looked up afterwards. The sums of a chunk fit 32 bits, of
    // which a register holds more: all rows together have less than 2^31 tokens.
    let mut ordered = first >= 0;
    let (mut blocks, mut live_rows) = (0_i64, 0_i64);
    for (starts, ends) in kv_indptr.chunks(CHUNK).zip(ends.chunks(CHUNK)) {
        let (mut chunk_blocks, mut chunk_live) = (0_u32, 0_u32);
        for (&start, &end) in starts.iter().zip(ends) {
            let length = end.wrapping_sub(start).cast_unsigned();
            ordered &= start <= end;
            chunk_blocks = chunk_blocks.wrapping_add(
                length.wrapping_add(BLOCK_TOKENS.unsigned_abs() - 1) / BLOCK_TOKENS.unsigned_abs(),
            );
            chunk_live += u32::from(length != 0);
        }
        blocks += i64::from(chunk_blocks);
        live_rows += i64::from(chunk_live);
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

//! The work schedule: which compute unit handles which piece of which row.
//!
//! A schedule is a list of *works*. Each is a piece of one row; `work_indptr` deals the list out to the *slots*, one
//! slot per compute unit. A row that fits its slot is one work and is written straight to the output. A row that is cut
//! has its pieces written to partial locations, which `reduce_indptr` then merges. The unit is the *block* of 16 KV
//! tokens. A *tile* is a row after folding: token row `b` with fold `f` is tiles `b * f .. (b + 1) * f`.
//!
//! The arrays are aiter's, as made by its v1.2 planner (`get_mla_metadata_v1` with `fast_mode=True`) for one query per
//! row, page size 1 and granularity 16. With [`Policy::Aiter`] so is what is in them.

mod balanced;
pub mod cost;
#[cfg(test)]
mod definition;
mod demand;
mod fill;
mod invariant;
mod kind;
mod lanes;
mod prices;
pub mod quality;
#[cfg(test)]
mod random;
mod rules;
mod safety;
mod search;
mod sink;
mod walk;
mod write;

pub use cost::CostTable;
pub use safety::{check, first_unsafe_work, is_safe};
pub use write::write_schedule;
pub(crate) use write::write_schedule_near;

use crate::support::Arch;
use crate::{PlanError, Rule};

/// KV tokens in a block, aiter's granularity.
pub const BLOCK_TOKENS: i32 = 16;
/// Fixed cost of a row in a slot, in blocks, as aiter's planner counts it.
pub const OVERHEAD_BLOCKS: i64 = 16;
/// Integers per work.
pub const WORK_WORDS: usize = 8;
/// Most compute units accepted. Far above any device, low enough that a slip cannot ask for gigabytes.
pub const MAX_NUM_CUS: usize = 1 << 16;
/// Largest fold accepted; 128 heads fold to 8.
pub const MAX_FOLD: usize = 128;

/// aiter's two planner kernels. They differ only on rows of length 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// The newer one: an empty row that does not fit the current slot gets no work.
    Parallel,
    /// The older one: every empty row gets an empty work.
    Serial,
}

/// What rows of length 0 get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EmptyRows {
    /// What aiter's planner gives them. Such a schedule may be unsafe to run, see [`first_unsafe_work`].
    Aiter,
    /// Nothing: no work, no weight in the balance, no share in the budget.
    Skip,
}

/// The function from the rows to their schedule; `docs/design.md` has the definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// aiter's own schedule.
    Aiter,
    /// A shorter longest slot, by what works cost: never longer than aiter's under the same table, if to each that cuts a row
    /// what a cut costs is added.
    Balanced(CostTable),
    /// Pieces that depend on their row alone, dealt out by what they cost.
    Invariant {
        /// What works cost.
        table: CostTable,
        /// Tokens of a piece, at least 1; the last piece of a row may be shorter.
        piece_tokens: i32,
    },
}

impl Policy {
    /// Checks the ranges.
    ///
    /// # Errors
    ///
    /// As [`CostTable::validate`], and [`PlanError::Number`] if `piece_tokens` is less than 1.
    pub fn validate(&self) -> Result<(), PlanError> {
        match *self {
            Self::Aiter => Ok(()),
            Self::Balanced(table) => table.validate(),
            Self::Invariant { table, piece_tokens } => {
                if piece_tokens < 1 {
                    return Err(PlanError::Number {
                        argument: "piece_tokens",
                        value: piece_tokens.into(),
                        rule: Rule::AtLeast(1),
                    });
                }
                table.validate()
            }
        }
    }

    /// Most works of `tiles` tiles of at most `topk` tokens on `num_cus` compute units.
    pub fn max_works(&self, tiles: usize, num_cus: usize, topk: i32) -> usize {
        match *self {
            Self::Aiter | Self::Balanced(_) => tiles.saturating_add(num_cus).saturating_sub(1),
            Self::Invariant { piece_tokens, .. } => {
                let pieces = topk
                    .max(0)
                    .unsigned_abs()
                    .div_ceil(piece_tokens.max(1).unsigned_abs());
                tiles.saturating_mul(usize::try_from(pieces).unwrap_or(usize::MAX))
            }
        }
    }
}

/// Everything a schedule depends on beside the row lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScheduleParams {
    /// Compute units, which is the number of slots in `work_indptr`.
    pub num_cus: usize,
    /// Split budget: at most `max_split_per_batch * tiles` slots are used; -1 for no limit.
    pub max_split_per_batch: i32,
    /// Tiles per row.
    pub fold: usize,
    /// Which of aiter's kernels to follow.
    pub variant: Variant,
    /// What rows of length 0 get; nothing under a policy other than [`Policy::Aiter`], whatever this says.
    pub empty_rows: EmptyRows,
    /// How the rows are placed.
    pub policy: Policy,
}

impl ScheduleParams {
    /// Checks the ranges.
    ///
    /// # Errors
    ///
    /// [`PlanError::Number`] if `num_cus` or `fold` is 0 or above its limit, or if `max_split_per_batch` is neither -1
    /// nor positive (aiter would divide by zero at 0); as [`Policy::validate`].
    pub fn validate(&self) -> Result<(), PlanError> {
        check_num_cus(self.num_cus)?;
        check_range("fold", self.fold, MAX_FOLD)?;
        if self.max_split_per_batch != -1 && self.max_split_per_batch < 1 {
            return Err(PlanError::Number {
                argument: "max_split_per_batch",
                value: self.max_split_per_batch.into(),
                rule: Rule::MinusOneOrPositive,
            });
        }
        self.policy.validate()
    }

    /// What rows of length 0 really get.
    pub(crate) fn empty_rows_of_policy(&self) -> EmptyRows {
        match self.policy {
            Policy::Aiter => self.empty_rows,
            Policy::Balanced(_) | Policy::Invariant { .. } => EmptyRows::Skip,
        }
    }
}

pub(crate) fn check_num_cus(num_cus: usize) -> Result<i32, PlanError> {
    check_range("num_cus", num_cus, MAX_NUM_CUS)
}

fn check_range(argument: &'static str, value: usize, most: usize) -> Result<i32, PlanError> {
    let (wide, most_wide) = (to_i64(value), to_i64(most));
    let refuse = |rule| {
        Err(PlanError::Number {
            argument,
            value: wide,
            rule,
        })
    };
    if value < 1 {
        return refuse(Rule::AtLeast(1));
    }
    match i32::try_from(value) {
        Ok(narrow) if value <= most => Ok(narrow),
        _ => refuse(Rule::AtMost(most_wide)),
    }
}

/// Widens a count for an error message or a sum; saturates where a count cannot be real.
pub(crate) fn to_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Sizes and intermediate values of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScheduleCounts {
    /// Works written to `work_info`.
    pub num_works: usize,
    /// Partial locations handed out, the last entry of `reduce_indptr`.
    pub num_partials: usize,
    /// Slots that the plan may use: `min(num_cus, max_split_per_batch * tiles)`.
    pub num_slots: usize,
    /// Blocks per slot by aiter's walk, row overhead included. i64 because folded totals pass 32 bits.
    pub blocks_per_slot: i64,
}

/// The arrays that [`write_schedule`] fills.
#[derive(Debug)]
pub struct ScheduleArrays<'a> {
    /// First work of each slot. Exactly `num_cus + 1` entries: their number sets the decode kernel's grid.
    pub work_indptr: &'a mut [i32],
    /// The works, 8 words each, 8 entries for each that there may be: `tiles + num_cus - 1`, or
    /// the pieces of all tiles under [`Policy::Invariant`]. Entries behind the last work are left alone.
    pub work_info: &'a mut [i32],
    /// First partial of each tile, at least `tiles + 1` entries. Filled to its end, with the total behind the last tile.
    pub reduce_indptr: &'a mut [i32],
}

/// A schedule that owns its arrays, each exactly as long as what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// What it was made with.
    pub params: ScheduleParams,
    /// Sizes and intermediate values.
    pub counts: ScheduleCounts,
    /// Length of each row, before folding, in tokens.
    pub row_lengths: Vec<i32>,
    /// First work of each slot, `num_cus + 1` entries.
    pub work_indptr: Vec<i32>,
    /// The works, `num_works * 8` entries. Words: tile, partial location or -1, first query, end of the queries, first
    /// KV position, end of the KV positions, positions of the row behind that, 0.
    pub work_info: Vec<i32>,
    /// First partial of each tile, `tiles + 1` entries.
    pub reduce_indptr: Vec<i32>,
    /// First query and end of the queries of each tile that is cut, -1 twice for the others. `tiles * 2` entries.
    pub reduce_final_map: Vec<i32>,
    /// Partial location of each partial, `num_partials` entries: they are handed out in order, so `0, 1, 2, ...`.
    pub reduce_partial_map: Vec<i32>,
}

/// Returns the schedule of the rows that `kv_indptr` bounds.
///
/// `kv_indptr` has `rows + 1` entries, non-decreasing, not negative. It may start above 0; KV positions are counted from
/// its first entry.
///
/// # Errors
///
/// As [`write_schedule`], and [`PlanError::Capacity`] if there is no memory for the arrays.
///
/// # Examples
///
/// ```
/// use mlaplan::schedule::{EmptyRows, Policy, ScheduleParams, Variant, schedule};
///
/// let params = ScheduleParams {
///     num_cus: 304,
///     max_split_per_batch: 4,
///     fold: 1,
///     variant: Variant::Parallel,
///     empty_rows: EmptyRows::Skip,
///     policy: Policy::Aiter,
/// };
/// let one_row = schedule(&[0, 2048], &params)?;
/// assert_eq!(one_row.counts.num_works, 4);
/// assert_eq!(one_row.reduce_indptr, [0, 4]);
/// # Ok::<(), mlaplan::PlanError>(())
/// ```
pub fn schedule(kv_indptr: &[i32], params: &ScheduleParams) -> Result<Schedule, PlanError> {
    let demand = demand::Demand::of(kv_indptr, params)?;
    let mut work_indptr = zeros(params.num_cus + 1)?;
    let mut work_info = zeros(demand.max_works * WORK_WORDS)?;
    let mut reduce_indptr = zeros(demand.tiles + 1)?;
    let mut out = ScheduleArrays {
        work_indptr: &mut work_indptr,
        work_info: &mut work_info,
        reduce_indptr: &mut reduce_indptr,
    };
    let counts = write_schedule(kv_indptr, params, &mut out)?;
    work_info.truncate(counts.num_works * WORK_WORDS);
    let mut reduce_final_map = zeros(demand.tiles * 2)?;
    for ((tile, rows), bounds) in (0_i32..)
        .zip(reduce_final_map.chunks_exact_mut(2))
        .zip(reduce_indptr.windows(2))
    {
        let queries = if bounds[0] < bounds[1] {
            [tile, tile + 1]
        } else {
            [-1, -1]
        };
        rows.copy_from_slice(&queries);
    }
    let mut reduce_partial_map = zeros(counts.num_partials)?;
    for (location, entry) in (0_i32..).zip(&mut reduce_partial_map) {
        *entry = location;
    }
    let row_lengths = kv_indptr.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
    Ok(Schedule {
        params: *params,
        counts,
        row_lengths,
        work_indptr,
        work_info,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
    })
}

/// An array of zeros, or an error where the process would otherwise be ended for lack of memory.
fn zeros(len: usize) -> Result<Vec<i32>, PlanError> {
    let mut entries = Vec::new();
    if entries.try_reserve_exact(len).is_err() {
        return Err(PlanError::Capacity {
            what: "entries of one array",
            needed: to_i64(len),
            available: 0,
        });
    }
    entries.resize(len, 0);
    Ok(entries)
}

/// Returns the kernel that aiter takes for a plan of `rows` rows, in the releases that have both.
///
/// The parallel one keeps `3 + 5 * rows` integers in LDS (64 KiB on gfx942, 160 KiB on gfx950) and does not fold.
pub fn default_variant(arch: Arch, rows: usize, fold: usize) -> Variant {
    let words = arch.lds_bytes() / size_of::<i32>();
    let needed = rows.saturating_mul(5).saturating_add(3);
    if fold == 1 && needed <= words {
        Variant::Parallel
    } else {
        Variant::Serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: ScheduleParams = ScheduleParams {
        num_cus: 304,
        max_split_per_batch: -1,
        fold: 1,
        variant: Variant::Parallel,
        empty_rows: EmptyRows::Aiter,
        policy: Policy::Aiter,
    };

    fn full_rows(rows: i32) -> Vec<i32> {
        (0..=rows).map(|row| row * 2048).collect()
    }

    #[test]
    fn slots_and_blocks_are_those_that_aiter_reports() {
        // (rows, budget, slots, blocks per slot) for rows of 2048 tokens on 304 units.
        let expected = [
            (1, -1, 304, 1),
            (8, -1, 304, 4),
            (32, -1, 304, 16),
            (64, -1, 304, 31),
            (128, -1, 304, 61),
            (512, -1, 304, 243),
            (1, 4, 4, 36),
            (8, 4, 32, 36),
            (32, 4, 128, 36),
            (64, 4, 256, 36),
            (128, 4, 304, 61),
            (1, 16, 16, 9),
            (8, 16, 128, 9),
            (32, 16, 304, 16),
            (64, 16, 304, 31),
        ];
        for (rows, budget, slots, blocks) in expected {
            let params = ScheduleParams {
                max_split_per_batch: budget,
                ..PARAMS
            };
            let counts = schedule(&full_rows(rows), &params).unwrap().counts;
            assert_eq!(
                (counts.num_slots, counts.blocks_per_slot),
                (slots, blocks),
                "{rows} rows, {budget}"
            );
        }
    }

    #[test]
    fn variant_changes_where_the_lds_is_full() {
        assert_eq!(default_variant(Arch::Gfx942, 3276, 1), Variant::Parallel);
        assert_eq!(default_variant(Arch::Gfx942, 3277, 1), Variant::Serial);
        assert_eq!(default_variant(Arch::Gfx950, 8191, 1), Variant::Parallel);
        assert_eq!(default_variant(Arch::Gfx950, 8192, 1), Variant::Serial);
        assert_eq!(default_variant(Arch::Gfx950, 1, 2), Variant::Serial);
        assert_eq!(default_variant(Arch::Gfx950, usize::MAX, 1), Variant::Serial);
    }

    #[test]
    fn bad_parameters_are_named() {
        let name = |params: ScheduleParams| match params.validate() {
            Err(PlanError::Number { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        assert_eq!(name(ScheduleParams { num_cus: 0, ..PARAMS }), "num_cus");
        assert_eq!(
            name(ScheduleParams {
                num_cus: MAX_NUM_CUS + 1,
                ..PARAMS
            }),
            "num_cus"
        );
        assert_eq!(name(ScheduleParams { fold: 0, ..PARAMS }), "fold");
        assert_eq!(
            name(ScheduleParams {
                fold: usize::MAX,
                ..PARAMS
            }),
            "fold"
        );
        for budget in [0, -2, i32::MIN] {
            assert_eq!(
                name(ScheduleParams {
                    max_split_per_batch: budget,
                    ..PARAMS
                }),
                "max_split_per_batch"
            );
        }
        assert_eq!(
            ScheduleParams {
                num_cus: MAX_NUM_CUS,
                fold: MAX_FOLD,
                ..PARAMS
            }
            .validate(),
            Ok(())
        );
    }

    #[test]
    fn one_full_row_with_budget_four_is_cut_into_four() {
        let schedule = schedule(
            &[0, 2048],
            &ScheduleParams {
                max_split_per_batch: 4,
                ..PARAMS
            },
        )
        .unwrap();
        let (works, _) = schedule.work_info.as_chunks::<WORK_WORDS>();
        assert_eq!(
            works,
            [
                [0, 0, 0, 1, 0, 576, 1472, 0],
                [0, 1, 0, 1, 576, 1152, 896, 0],
                [0, 2, 0, 1, 1152, 1728, 320, 0],
                [0, 3, 0, 1, 1728, 2048, 0, 0],
            ]
        );
        assert_eq!(schedule.work_indptr[..6], [0, 1, 2, 3, 4, 4]);
        assert_eq!(schedule.reduce_final_map, [0, 1]);
        assert_eq!(schedule.reduce_partial_map, [0, 1, 2, 3]);
        assert_eq!(schedule.row_lengths, [2048]);
    }
}

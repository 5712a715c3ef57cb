//! Where the arrays of a plan lie: one layout per class of row counts, all over the same memory.

use crate::rows::check_tokens;
use crate::schedule::ScheduleArrays;
use crate::step::StepConfig;
use crate::{Expected, PlanError, Rule};

/// 32-bit words of one work.
const WORK_WORDS: i32 = 8;

/// Where the arrays of one class of row counts lie in the arena, in 32-bit words from its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassLayout {
    /// Rows of the class.
    pub rows: usize,
    /// First word of `request_ids`, `kv_indptr`, `work_indptr`, `reduce_indptr` and `work_info`, ascending.
    pub offsets: [usize; 5],
    /// Words from the base to the end of `work_info`.
    pub words: usize,
}

/// Checks that the classes ascend and that each has room for its arrays.
pub(crate) fn check_classes(config: &StepConfig) -> Result<(), PlanError> {
    let mut smallest = 1;
    for (index, layout) in config.classes.iter().enumerate() {
        let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        if layout.rows < smallest {
            return Err(PlanError::Entry {
                argument: "classes",
                index,
                value: as_number(layout.rows),
                rule: Rule::AtLeast(as_number(smallest)),
            });
        }
        check_tokens(layout.rows, config.topk)?;
        smallest = layout.rows + 1;
        let tiles = layout.rows.saturating_mul(config.fold);
        let works = config.policy.max_works(tiles, config.num_cus, config.topk);
        check_tokens(tiles.saturating_add(config.num_cus).max(works), WORK_WORDS)?;
        let sizes = array_sizes(layout.rows, config);
        for (array, size) in sizes.into_iter().enumerate() {
            let end = layout.offsets.get(array + 1).copied().unwrap_or(layout.words);
            if layout.offsets[array].saturating_add(size) > end {
                return Err(PlanError::Entry {
                    argument: "layout words of classes",
                    index,
                    value: as_number(end),
                    rule: Rule::AtLeast(as_number(layout.offsets[array].saturating_add(size))),
                });
            }
        }
    }
    if config.classes.is_empty() {
        return Err(PlanError::Length {
            argument: "classes",
            actual: 0,
            expected: Expected::AtLeast(1),
        });
    }
    Ok(())
}

/// Words of each array of a class, in the order of [`ClassLayout::offsets`].
fn array_sizes(rows: usize, config: &StepConfig) -> [usize; 5] {
    let tiles = rows * config.fold;
    [
        rows,
        rows + 1,
        config.num_cus + 1,
        tiles + 1,
        8 * config.policy.max_works(tiles, config.num_cus, config.topk),
    ]
}

/// Cuts a staging area into its arrays: the schedule's, the request ids and `kv_indptr`.
pub(crate) fn split_arrays<'a>(
    staging: &'a mut [i32],
    layout: &ClassLayout,
    config: &StepConfig,
) -> (ScheduleArrays<'a>, &'a mut [i32], &'a mut [i32]) {
    let mut rest = staging;
    let mut start = 0;
    let mut next = |offset: usize, size: usize| {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(offset - start);
        let (array, behind) = tail.split_at_mut(size);
        rest = behind;
        start = offset + size;
        array
    };
    let sizes = array_sizes(layout.rows, config);
    let request_ids = next(layout.offsets[0], sizes[0]);
    let kv_indptr = next(layout.offsets[1], sizes[1]);
    let work_indptr = next(layout.offsets[2], sizes[2]);
    let reduce_indptr = next(layout.offsets[3], sizes[3]);
    let work_info = next(layout.offsets[4], sizes[4]);
    (
        ScheduleArrays {
            work_indptr,
            work_info,
            reduce_indptr,
        },
        request_ids,
        kv_indptr,
    )
}

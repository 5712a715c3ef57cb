//! What aiter's decode kernels can do, by GPU, head count, dtypes and aiter release.
//!
//! Facts about aiter as of commit e4048607 (after v0.1.20.post1); folds and planner variants also for the earlier
//! releases, where they were seen by running each release's planner.

mod names;

pub use names::{Arch, Dtype, Release};

use crate::schedule::{Variant, check_num_cus, default_variant, to_i64};
use crate::{PlanError, Rule};

/// Most query heads that a plan is made for.
pub const MAX_HEADS: usize = 128;

/// What aiter can do with a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, read by name")]
pub struct Support {
    /// Planner rows per token row. 1 where nothing can be planned.
    pub fold: usize,
    /// Whether the kernel takes the padded head count as it is.
    pub native: bool,
    /// Heads padded up to a multiple of 16. Sizing, planning and decoding must all use this number.
    pub padded_heads: usize,
    /// Whether the decode kernel that follows a schedule exists.
    pub persistent: bool,
    /// Whether the decode without a schedule exists for the padded heads, as a fallback.
    pub non_persistent: bool,
    /// Whether the persistent decode can also return the LSE of rows that are not cut.
    pub lse: bool,
    /// Whether `mla_decode_fwd` follows the schedule when it gets one.
    pub plan_used: bool,
    /// The planner kernel that aiter takes; None if that depends on the number of rows and it was not given, or if
    /// nothing can be planned.
    pub variant: Option<Variant>,
    /// One sentence: why there is no persistent decode, or how the shape is planned.
    pub reason: String,
}

/// How a release plans a shape.
#[derive(Debug, PartialEq, Eq)]
enum Planned {
    /// The kernel takes the heads as they are.
    Native,
    /// Each token row becomes `heads / 16` planner rows of 16 heads.
    Folded,
    /// Not in the way that plans here are made, or not known; why.
    Unsupported(&'static str),
}

const UNTAGGED: &str = "aiter changed how it plans that head count around this build between two releases";

/// Says what an aiter release can do with one query per row, page size 1.
///
/// `rows` is the number of token rows of the plan, padding rows included, where it is known.
///
/// # Examples
///
/// ```
/// use mlaplan::support::{Arch, Dtype, Release, support};
///
/// let folded = support(Arch::Gfx942, 128, Dtype::Bf16, Dtype::Bf16, None, Release::NEWEST);
/// assert_eq!((folded.persistent, folded.fold), (true, 8));
/// let refused = support(Arch::Gfx942, 16, Dtype::Fp16, Dtype::Fp16, None, Release::NEWEST);
/// assert!(!refused.persistent);
/// ```
pub fn support(
    arch: Arch,
    heads: usize,
    q: Dtype,
    kv: Dtype,
    rows: Option<usize>,
    release: Release,
) -> Support {
    let padded = if heads <= MAX_HEADS {
        heads.next_multiple_of(16)
    } else {
        heads
    };
    let planned = unplannable(heads, q, kv).map_or_else(
        || {
            let [before, after] = release.around().map(|tag| planned(arch, padded, q, kv, tag));
            if before == after {
                after
            } else {
                Planned::Unsupported(UNTAGGED)
            }
        },
        Planned::Unsupported,
    );
    let mut support = Support {
        fold: 1,
        native: false,
        padded_heads: padded,
        persistent: false,
        non_persistent: has_non_persistent(arch, padded, q, kv),
        lse: false,
        plan_used: false,
        variant: None,
        reason: String::new(),
    };
    match planned {
        Planned::Unsupported(why) => {
            support.reason = format!("{arch}, {heads} heads, {q} queries, {kv} KV: {why}");
            return support;
        }
        Planned::Native => {
            support.native = true;
            support.reason = format!("{padded} heads are native to the kernel");
        }
        Planned::Folded => {
            support.fold = padded / 16;
            support.reason = format!(
                "{padded} heads are planned as {} rows of 16 heads per token",
                support.fold
            );
        }
    }
    support.persistent = true;
    let kernel_heads = if support.native { padded } else { 16 };
    support.lse = has_lse(arch, kernel_heads, q, kv, release);
    support.plan_used = !ignores_plan(arch, padded, q, kv, rows, release);
    support.variant = variant(arch, rows, support.fold, release);
    if padded != heads {
        support.reason = format!("{heads} heads are padded to {padded}, and {}", support.reason);
    }
    if !support.plan_used {
        support.reason += "; mla_decode_fwd decodes batches of 32 rows or more without the schedule";
    }
    support
}

/// Why no release plans this, from heads and dtypes alone.
fn unplannable(heads: usize, q: Dtype, kv: Dtype) -> Option<&'static str> {
    match (q, kv) {
        _ if heads == 0 => Some("there is nothing to plan without heads"),
        _ if heads > MAX_HEADS => Some("aiter has no persistent decode kernel for more than 128 heads"),
        (Dtype::Bf16, Dtype::Bf16 | Dtype::Fp8) | (Dtype::Fp8, Dtype::Fp8) => None,
        _ => Some("aiter has decode kernels for bf16/bf16, bf16/fp8 and fp8/fp8 only"),
    }
}

/// The fold rule, by release. `heads` is a multiple of 16, at most 128.
fn planned(arch: Arch, heads: usize, q: Dtype, kv: Dtype, release: Release) -> Planned {
    let native = match (arch, q, kv, heads) {
        (_, _, _, 16) | (Arch::Gfx942, Dtype::Fp8, Dtype::Fp8, 128) => true,
        (Arch::Gfx942, Dtype::Fp8, Dtype::Fp8, 64) => release.since(18),
        (Arch::Gfx950, Dtype::Bf16, Dtype::Bf16, 32 | 64) => release.since(14),
        (Arch::Gfx950, Dtype::Bf16, Dtype::Bf16, 128) => release.since(13),
        (Arch::Gfx950, Dtype::Bf16, Dtype::Bf16, _) => {
            // Only 32, 64 and 128 heads were looked at between the first native kernels and the general rule.
            if release.since(13) && !release.since(18) {
                return Planned::Unsupported("how this aiter release plans that head count is not known");
            }
            release.since(18)
        }
        // Native in v0.1.15, folded again in v0.1.16.
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8, 32) => release.is_of(15) || release.since(17),
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8, 64 | 128) if release.is_of(11) => {
            return Planned::Unsupported("how aiter v0.1.11 plans that head count is not known");
        }
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8, 64) if release.is_of(12) => {
            return Planned::Unsupported("aiter v0.1.12 folds that head count into queries, not into rows");
        }
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8, 64) => release.since(13),
        // Native up to v0.1.10.x, folded in v0.1.12 and v0.1.13.
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8, 128) => !release.since(12) || release.since(14),
        _ => false,
    };
    if native { Planned::Native } else { Planned::Folded }
}

/// Whether `mla_decode_fwd` works without metadata.
///
/// 64 bf16 heads on gfx942 are left out: the launch code asks for a one-query kernel that gfx942 does not have.
fn has_non_persistent(arch: Arch, heads: usize, q: Dtype, kv: Dtype) -> bool {
    match (arch, q, kv) {
        (Arch::Gfx942, Dtype::Bf16, Dtype::Bf16) => matches!(heads, 16 | 32 | 128),
        (Arch::Gfx950, Dtype::Bf16, Dtype::Bf16) => matches!(heads, 16 | 32 | 64 | 128),
        (_, Dtype::Fp8, Dtype::Fp8) => matches!(heads, 16 | 128),
        _ => false,
    }
}

/// Whether the kernel for `heads` heads is there in its LSE form. Which kernels are is known from v0.1.20 on, and a
/// missing one ends the process.
fn has_lse(arch: Arch, heads: usize, q: Dtype, kv: Dtype, release: Release) -> bool {
    let listed = match (arch, q, kv) {
        (Arch::Gfx942, Dtype::Fp8, Dtype::Fp8) => heads == 64,
        (Arch::Gfx950, Dtype::Bf16, Dtype::Bf16) => true,
        (Arch::Gfx950, Dtype::Fp8, Dtype::Fp8) => matches!(heads, 16 | 32 | 64 | 128),
        _ => false,
    };
    listed && release.since(20)
}

/// Whether `mla_decode_fwd` drops the metadata of this call (its gate has 32 rows as default).
fn ignores_plan(
    arch: Arch,
    heads: usize,
    q: Dtype,
    kv: Dtype,
    rows: Option<usize>,
    release: Release,
) -> bool {
    let shape = (arch, heads, q, kv) == (Arch::Gfx950, 16, Dtype::Bf16, Dtype::Bf16);
    shape && release.since(18) && rows.is_some_and(|rows| rows >= 32)
}

fn variant(arch: Arch, rows: Option<usize>, fold: usize, release: Release) -> Option<Variant> {
    if fold > 1 || !release.has_parallel_planner() {
        return Some(Variant::Serial);
    }
    rows.map(|rows| default_variant(arch, rows, fold))
}

/// Shapes of the metadata buffers that aiter's planner writes to, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferShapes {
    /// uint64: addresses of `work_indptr` and `work_info_set`.
    pub work_metadata_ptrs: usize,
    /// int32.
    pub work_indptr: usize,
    /// int32.
    pub work_info_set: [usize; 2],
    /// int32.
    pub reduce_indptr: usize,
    /// int32.
    pub reduce_final_map: [usize; 2],
    /// int32; its length also sets how many partial rows `mla_decode_fwd` allocates per call.
    pub reduce_partial_map: usize,
}

/// Returns the shapes that aiter's `get_mla_metadata_info_v1` (newest release) gives for `max_rows` rows of one query,
/// in its fast mode and without a split limit, which it does not need to be large enough.
///
/// Heads are padded up to a multiple of 16 first, as in [`support`].
///
/// # Errors
///
/// [`PlanError::Number`] if `heads` is not in `1..=128` or `num_cus` is out of range, [`PlanError::Capacity`] if there would
/// be more than 2^31 works.
pub fn buffer_shapes(
    max_rows: usize,
    heads: usize,
    arch: Arch,
    num_cus: usize,
    q: Dtype,
    kv: Dtype,
) -> Result<BufferShapes, PlanError> {
    check_num_cus(num_cus)?;
    if !(1..=MAX_HEADS).contains(&heads) {
        let rule = if heads == 0 {
            Rule::AtLeast(1)
        } else {
            Rule::AtMost(to_i64(MAX_HEADS))
        };
        return Err(PlanError::Number {
            argument: "heads",
            value: to_i64(heads),
            rule,
        });
    }
    let tiles_per_row = sized_tiles(arch, heads.next_multiple_of(16), q, kv);
    let needed = to_i64(max_rows)
        .saturating_add(to_i64(num_cus))
        .saturating_mul(to_i64(tiles_per_row));
    if needed > i64::from(i32::MAX) {
        return Err(PlanError::Capacity {
            what: "works of max_rows",
            needed,
            available: i32::MAX.into(),
        });
    }
    let tiles = max_rows * tiles_per_row;
    // Works of an unfolded plan, and partials: each slot but the first and the last can add two.
    let works = max_rows + num_cus - 1;
    Ok(BufferShapes {
        work_metadata_ptrs: 2,
        work_indptr: num_cus + 1,
        work_info_set: [works * tiles_per_row, 8],
        reduce_indptr: tiles + 1,
        reduce_final_map: [tiles, 2],
        reduce_partial_map: tiles_per_row * works.min(2 * (num_cus - 1)),
    })
}

/// Tiles per row that aiter sizes for: 1 where it has a kernel for that many heads, else one per 16 heads. This can be
/// more than the fold.
fn sized_tiles(arch: Arch, heads: usize, q: Dtype, kv: Dtype) -> usize {
    let is_one = match (arch, q == Dtype::Fp8, kv == Dtype::Fp8) {
        (_, true, true) => matches!(heads, 16 | 64 | 128),
        (Arch::Gfx950, false, false) => heads == 16 || heads >= 64,
        _ => heads == 16,
    };
    if is_one { 1 } else { heads / 16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_do_not_overflow() {
        for rows in [usize::MAX, 1 << 40, 1 << 31] {
            assert!(buffer_shapes(rows, 128, Arch::Gfx942, 304, Dtype::Bf16, Dtype::Bf16).is_err());
        }
        let none = buffer_shapes(0, 16, Arch::Gfx942, 1, Dtype::Bf16, Dtype::Bf16).unwrap();
        assert_eq!((none.work_info_set, none.reduce_partial_map), ([0, 8], 0));
    }
}

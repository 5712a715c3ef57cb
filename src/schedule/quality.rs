//! How good a schedule is: its finish time, and a bound that no schedule of the same rows can beat.

use super::{CostTable, WORK_WORDS};

/// Returns the cost of the most expensive slot, 0 if there are no slots.
///
/// A work with partial location -1 counts as a whole row. Works that `work_indptr` names but `work_info` does not hold
/// count as nothing.
pub fn finish_time(work_indptr: &[i32], work_info: &[i32], table: &CostTable) -> u64 {
    let (works, _) = work_info.as_chunks::<WORK_WORDS>();
    let at = |entry: i32| usize::try_from(entry).unwrap_or(0).min(works.len());
    let slot_cost = |bounds: &[i32]| {
        let works = works.get(at(bounds[0])..at(bounds[1])).unwrap_or_default();
        works.iter().fold(u64::from(table.slot), |sum, work| {
            let tokens = u32::try_from(i64::from(work[5]) - i64::from(work[4])).unwrap_or(0);
            sum.saturating_add(table.work(tokens, work[1] == -1))
        })
    };
    work_indptr.windows(2).map(slot_cost).max().unwrap_or(0)
}

/// Returns a finish time that no schedule of these rows on `num_slots` slots can go below, wherever it cuts and
/// whatever order it takes. `row_lengths` are in tokens, each row standing for `fold` tiles; rows of length 0 have no
/// work. 0 if there are no slots, `u64::MAX` at most.
///
/// Proof. Take any schedule and let `x` be its finish time less the cost of a slot, so the works of each slot cost `x`
/// or less. Consider a row of `n` blocks.
///
/// - If it is one work, that work costs `whole + n * block`, which is at most `x`.
/// - If it is cut into `k >= 2` pieces, each piece touches at least one block and, as it costs at most `x`, at most
///   `m = floor((x - piece) / block)`. The pieces together touch at least `n` blocks and at least `k`, for rounding up
///   piece by piece gives no less than rounding up the whole. So `k >= max(2, ceil(n / m))` and the row costs at least
///   `max(n, k) * block + k * piece`, which grows with `k`.
///
/// *Cost.* Let `least(row, x)` be the smaller of the two where both are possible under `x`, and infinite if neither is.
/// All works cost at least the sum of `least(row, x)` and at most `num_slots * x`.
///
/// *Whole blocks.* Let `works(x)` be the number of works that the rows take at least: 1 for a row that can be whole, else
/// `max(2, ceil(n / m))`. With `p = min(piece, whole)`, a slot with `j` works takes at most `h(j) = floor((x - j * p) / block)`
/// blocks, and one without works not more than `h(1)`. Let `g` be the least concave function above `h` on `1 ..= x / p`; like
/// `h` it does not increase. By Jensen's inequality the slots take at most `num_slots * g(max(1, works(x) / num_slots))` blocks,
/// and that must be no less than the blocks of all rows.
///
/// As `x` grows, more becomes possible, so either condition, once kept, stays kept. Hence there is a smallest `x` that
/// keeps both, every schedule's `x` is at least that, and the result is that `x` plus the cost of a slot. It is at least
/// the average over the slots, and at least the best that can be done for the longest row alone.
pub fn lower_bound(row_lengths: &[i32], fold: usize, num_slots: usize, table: &CostTable) -> u64 {
    if num_slots == 0 {
        return 0;
    }
    let live = || {
        row_lengths
            .iter()
            .filter_map(|&length| u32::try_from(length).ok())
            .filter(|&l| l > 0)
    };
    let is_possible = |x: u64| {
        let mut sum = Least::default();
        for length in live() {
            let Some(row) = Least::of(table.blocks(length), x, table) else {
                return false;
            };
            // A row's numbers are below 2^66, and a slice holds less than 2^61 rows.
            sum.cost += row.cost;
            sum.blocks += row.blocks;
            sum.works += row.works;
        }
        sum.times(fold as u128).fits(num_slots as u128, x, table)
    };
    // All rows whole in one slot is a schedule, so its cost is possible.
    let whole = live()
        .map(|length| table.work(length, true))
        .fold(0_u64, u64::saturating_add);
    let mut high = whole.saturating_mul(fold as u64);
    let mut low = 0;
    while low < high {
        let middle = low + (high - low) / 2;
        if is_possible(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low.saturating_add(table.slot.into())
}

/// What rows need at least, each number taken by itself.
#[derive(Debug, Clone, Copy, Default)]
struct Least {
    cost: u128,
    blocks: u128,
    works: u128,
}

impl Least {
    /// For one row of `blocks` blocks, if no work may cost more than `x`.
    fn of(blocks: u64, x: u64, table: &CostTable) -> Option<Self> {
        let (block, piece) = (u64::from(table.block), u64::from(table.piece));
        let whole = blocks * block + u64::from(table.whole);
        let uncut = (whole <= x).then_some((u128::from(whole), 1));
        let cut = x.checked_sub(piece).and_then(|rest| {
            let most = rest.checked_div(block).unwrap_or(u64::MAX);
            let pieces = if most == 0 {
                return None;
            } else {
                blocks.div_ceil(most).max(2)
            };
            let touched = u128::from(blocks.max(pieces)) * u128::from(block);
            Some((touched + u128::from(pieces) * u128::from(piece), pieces))
        });
        let (cost, works) = match (uncut, cut) {
            (Some(uncut), Some(cut)) => (uncut.0.min(cut.0), 1),
            (uncut, cut) => uncut.or(cut)?,
        };
        Some(Self {
            cost,
            blocks: blocks.into(),
            works: works.into(),
        })
    }

    fn times(self, fold: u128) -> Self {
        let [cost, blocks, works] = [self.cost, self.blocks, self.works].map(|n| n.saturating_mul(fold));
        Self { cost, blocks, works }
    }

    /// Whether `num_slots` slots of cost `x` can hold this.
    fn fits(self, num_slots: u128, x: u64, table: &CostTable) -> bool {
        self.cost <= num_slots.saturating_mul(x.into())
            && self.fits_in_blocks(num_slots, x, table).unwrap_or(true)
    }

    /// The condition on whole blocks; None where it is not looked at, which leaves the bound valid.
    fn fits_in_blocks(self, num_slots: u128, x: u64, table: &CostTable) -> Option<bool> {
        let fixed = u64::from(table.piece.min(table.whole));
        let most_works = x
            .checked_div(fixed)
            .filter(|&most| most <= MOST_WORKS_LOOKED_AT)?;
        let room = |works: u64| {
            (x - works * fixed)
                .checked_div(table.block.into())
                .map(u128::from)
        };
        if most_works == 0 {
            return Some(self.works == 0);
        }
        // Follows the corners of the concave function up to the mean number of works per slot.
        let mut from = 1;
        while num_slots.checked_mul(from.into())? < self.works {
            let start = room(from)?;
            let mut corner: Option<(u64, u128)> = None;
            for to in from + 1..=most_works {
                let drop = start - room(to)?;
                let is_flatter =
                    |(to_now, drop_now)| drop * u128::from(to_now - from) <= drop_now * u128::from(to - from);
                if corner.is_none_or(is_flatter) {
                    corner = Some((to, drop));
                }
            }
            let Some((to, drop)) = corner else {
                return Some(false);
            };
            if num_slots.checked_mul(to.into())? >= self.works {
                let length = u128::from(to - from);
                let beyond = self.works - num_slots * u128::from(from);
                let taken = num_slots.checked_mul(start)?.checked_mul(length)?;
                let needed = self
                    .blocks
                    .checked_mul(length)?
                    .checked_add(drop.checked_mul(beyond)?)?;
                return Some(taken >= needed);
            }
            from = to;
        }
        Some(num_slots.checked_mul(room(1)?)? >= self.blocks)
    }
}

/// Works per slot up to which the bound looks at whole blocks; beyond, rounding hardly matters and time does.
const MOST_WORKS_LOOKED_AT: u64 = 1 << 10;

/// A schedule's finish time against the bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// Cost of the most expensive slot, in the table's unit.
    pub finish_time: u64,
    /// What no schedule can go below, in the same unit.
    pub lower_bound: u64,
}

impl Quality {
    /// `finish_time / lower_bound`, 1 for a schedule without cost.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn ratio(&self) -> f64 {
        if self.lower_bound == 0 {
            1.0
        } else {
            self.finish_time as f64 / self.lower_bound as f64
        }
    }
}

impl super::Schedule {
    /// Measures the schedule under `table`, the bound taken over the slots that its budget allows.
    pub fn quality(&self, table: &CostTable) -> Quality {
        Quality {
            finish_time: finish_time(&self.work_indptr, &self.work_info, table),
            lower_bound: lower_bound(&self.row_lengths, self.params.fold, self.counts.num_slots, table),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EmptyRows, Policy, ScheduleParams, Variant, schedule};
    use super::*;

    fn full_rows(rows: i32, num_cus: usize, table: &CostTable) -> Quality {
        let kv_indptr: Vec<i32> = (0..=rows).map(|row| row * 2048).collect();
        let params = ScheduleParams {
            num_cus,
            max_split_per_batch: 16,
            fold: 1,
            variant: Variant::Parallel,
            empty_rows: EmptyRows::Skip,
            policy: Policy::Aiter,
        };
        schedule(&kv_indptr, &params).unwrap().quality(table)
    }

    #[test]
    fn finish_time_is_the_instruction_count_seen_in_the_emulator() {
        // Instructions of the longest slot of aiter's plan, rounded as published with the kernels' costs.
        for (rows, expected) in [(1, 3968), (16, 3968), (64, 10_820), (256, 39_167)] {
            let tenths = full_rows(rows, 304, &CostTable::BF16_HEADS_16).finish_time;
            assert!(tenths.abs_diff(10 * expected) <= 5, "{rows} rows: {tenths}");
        }
        let tenths = full_rows(1, 304, &CostTable::GFX942_FP8_HEADS_16).finish_time;
        assert!(tenths.abs_diff(19_540) <= 5, "{tenths}");
    }

    #[test]
    fn aiter_slots_keep_to_their_payload_in_its_own_units() {
        for rows in [1, 7, 64, 300, 513] {
            let quality = full_rows(rows, 304, &CostTable::AITER);
            assert!(quality.ratio() >= 1.0);
            assert!(
                quality.finish_time <= quality.lower_bound + 16,
                "{rows} rows: {quality:?}"
            );
        }
    }

    #[test]
    fn bound_is_reached_where_the_optimum_is_obvious() {
        let table = CostTable {
            block_tokens: 16,
            block: 10,
            piece: 3,
            whole: 5,
            slot: 2,
            merge: 0,
            cut: 0,
        };
        // One slot: everything whole.
        assert_eq!(lower_bound(&[16, 32], 1, 1, &table), 2 + 15 + 25);
        // A slot per row of one block, which cannot be cut.
        assert_eq!(lower_bound(&[16, 1], 1, 2, &table), 2 + 15);
        // Two slots for one row of four blocks: two pieces of two.
        assert_eq!(lower_bound(&[64], 1, 2, &table), 2 + 23);
        // With as many slots as one likes, a block each.
        assert_eq!(lower_bound(&[64], 1, 100, &table), 2 + 13);
        assert_eq!(lower_bound(&[64, 0], 3, 300, &table), 2 + 13);
        assert_eq!(lower_bound(&[], 1, 4, &table), 2);
        assert_eq!(lower_bound(&[64], 1, 0, &table), 0);
    }

    #[test]
    fn odd_tables_and_arrays_do_not_panic() {
        let huge = CostTable {
            block_tokens: 0,
            block: u32::MAX,
            piece: u32::MAX,
            whole: u32::MAX,
            slot: u32::MAX,
            merge: u32::MAX,
            cut: u32::MAX,
        };
        let free = CostTable {
            block_tokens: 0,
            block: 0,
            piece: 0,
            whole: 0,
            slot: 0,
            merge: 0,
            cut: 0,
        };
        let info = [0, -1, 0, 1, i32::MIN, i32::MAX, 0, 0, 1];
        for table in [huge, free] {
            for work_indptr in [&[][..], &[0], &[0, 1, 5], &[5, 1], &[-3, i32::MAX]] {
                finish_time(work_indptr, &info, &table);
            }
            lower_bound(&[i32::MAX, -1, 0, i32::MAX], usize::MAX, usize::MAX, &table);
            lower_bound(&[i32::MAX; 3], usize::MAX, 1, &table);
        }
        assert_eq!(
            Quality {
                finish_time: 0,
                lower_bound: 0
            }
            .ratio()
            .to_bits(),
            1.0_f64.to_bits()
        );
    }
}

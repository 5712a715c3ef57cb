//! The lower bound against schedules of every kind: none may finish before it.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is a failed test"
)]

use mlaplan::schedule::quality::{finish_time, lower_bound};
use mlaplan::schedule::{CostTable, EmptyRows, Policy, ScheduleParams, Variant, schedule};
use proptest::prelude::*;

fn indptr(lengths: &[i32]) -> Vec<i32> {
    let mut entries = vec![0];
    for length in lengths {
        entries.push(entries[entries.len() - 1] + length);
    }
    entries
}

fn lengths() -> impl Strategy<Value = Vec<i32>> {
    let length = prop_oneof![Just(2048), Just(0), 1..300_i32, 1..5000_i32];
    prop_oneof![
        prop::collection::vec(length.clone(), 0..60),
        (length, 0..400_usize).prop_map(|(length, rows)| vec![length; rows]),
    ]
}

fn any_params() -> impl Strategy<Value = ScheduleParams> {
    let num_cus = prop_oneof![1..12_usize, Just(256), Just(304)];
    (num_cus, prop_oneof![Just(-1), 1..20_i32], 1..5_usize).prop_map(
        |(num_cus, max_split_per_batch, fold)| {
            let (variant, empty_rows) = (Variant::Parallel, EmptyRows::Skip);
            ScheduleParams {
                num_cus,
                max_split_per_batch,
                fold,
                variant,
                empty_rows,
                policy: Policy::Aiter,
            }
        },
    )
}

/// The best finish time of all schedules that cut at block boundaries, found by trying them.
struct Search {
    table: CostTable,
    rows: Vec<u32>,
    loads: Vec<u64>,
    best: u64,
}

impl Search {
    fn optimum(table: CostTable, rows: &[u32], num_slots: usize) -> u64 {
        let loads = vec![u64::from(table.slot); num_slots];
        let mut search = Self {
            table,
            rows: rows.to_vec(),
            loads,
            best: u64::MAX,
        };
        search.place(0, 0);
        search.best
    }

    /// Tries all ways to place the rows from `row` on, `done` blocks of that one being placed.
    fn place(&mut self, row: usize, done: u32) {
        let finish = self.loads.iter().copied().max().unwrap();
        if finish >= self.best {
            return;
        }
        let Some(&blocks) = self.rows.get(row) else {
            self.best = finish;
            return;
        };
        for taken in 1..=blocks - done {
            let cost = u64::from(taken) * u64::from(self.table.block)
                + u64::from(if taken == blocks {
                    self.table.whole
                } else {
                    self.table.piece
                });
            let next = if done + taken == blocks {
                (row + 1, 0)
            } else {
                (row, done + taken)
            };
            for slot in 0..self.loads.len() {
                self.loads[slot] += cost;
                self.place(next.0, next.1);
                self.loads[slot] -= cost;
            }
        }
    }
}

/// A cost table and any schedule at all: each row is cut anywhere, each piece put in any slot.
fn random_schedule() -> impl Strategy<Value = (CostTable, Vec<i32>, usize, Vec<i32>, Vec<i32>)> {
    let table = (1..70_u32, 0..100_u32, 0..300_u32, 0..300_u32, 0..50_u32).prop_map(
        |(block_tokens, block, piece, whole, slot)| CostTable {
            block_tokens,
            block,
            piece,
            whole,
            slot,
            merge: 0,
            cut: 0,
        },
    );
    let row = (
        1..400_i32,
        prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    );
    let rows = prop::collection::vec(row, 0..12);
    let slots = prop::collection::vec(any::<prop::sample::Index>(), 72);
    (table, rows, 1..9_usize, slots, any::<bool>()).prop_map(|(table, rows, num_slots, choice, aligned)| {
        let mut slots = vec![Vec::new(); num_slots];
        let mut choice = choice.into_iter();
        let mut lengths = Vec::new();
        for (length, cuts) in rows {
            let step = if aligned {
                usize::try_from(table.block_tokens).unwrap()
            } else {
                1
            };
            let tokens = usize::try_from(length).unwrap();
            let mut ends: Vec<usize> = cuts
                .iter()
                .map(|cut| cut.index(tokens / step + 1) * step)
                .collect();
            ends.extend([0, tokens]);
            ends.sort_unstable();
            ends.dedup();
            let location = if ends.len() > 2 { 0 } else { -1 };
            for piece in ends.windows(2) {
                let [from, to] = [piece[0], piece[1]].map(|end| i32::try_from(end).unwrap());
                let slot = choice.next().unwrap().index(num_slots);
                slots[slot].push([0, location, 0, 1, from, to, 0, 0]);
            }
            lengths.push(length);
        }
        let mut work_indptr = vec![0];
        for slot in &slots {
            work_indptr.push(work_indptr[work_indptr.len() - 1] + i32::try_from(slot.len()).unwrap());
        }
        (table, lengths, num_slots, work_indptr, slots.concat().concat())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_schedule_beats_the_bound((table, lengths, num_slots, work_indptr, work_info) in random_schedule()) {
        let finish = finish_time(&work_indptr, &work_info, &table);
        prop_assert!(finish >= lower_bound(&lengths, 1, num_slots, &table));
    }

    #[test]
    fn optimum_of_small_batches_is_not_below_the_bound(
        rows in prop::collection::vec(1..5_u32, 1..4), num_slots in 1..4_usize,
        block_tokens in 1..70_u32, costs in prop::array::uniform4(0..20_u32), spare in any::<prop::sample::Index>(),
    ) {
        let [block, piece, whole, slot] = costs;
        let table = CostTable { block_tokens, block, piece, whole, slot, merge: 0, cut: 0 };
        // The last block of each row may be short.
        let missing = u32::try_from(spare.index(usize::try_from(block_tokens).unwrap())).unwrap();
        let length = |blocks: &u32| i32::try_from(blocks * block_tokens - missing).unwrap();
        let lengths: Vec<i32> = rows.iter().map(length).collect();
        let optimum = Search::optimum(table, &rows, num_slots);
        let bound = lower_bound(&lengths, 1, num_slots, &table);
        prop_assert!(bound <= optimum, "{} > {}", bound, optimum);
    }

    #[test]
    fn aiter_never_beats_the_bound(lengths in lengths(), params in any_params()) {
        let made = schedule(&indptr(&lengths), &params).unwrap();
        for table in [
            CostTable::AITER, CostTable::BF16_HEADS_16, CostTable::GFX942_FP8_HEADS_16, CostTable::GFX950_BF16_HEADS_64,
        ] {
            let quality = made.quality(&table);
            prop_assert!(quality.finish_time >= quality.lower_bound, "{:?}", quality);
            let folded: Vec<i32> = lengths.iter().flat_map(|&l| vec![l; params.fold]).collect();
            let bound = lower_bound(&folded, 1, made.counts.num_slots, &table);
            prop_assert_eq!(quality.lower_bound, bound);
        }
    }

    #[test]
    fn bound_is_at_least_the_average_and_the_longest_row(
        (table, lengths, num_slots, _, _) in random_schedule()
    ) {
        let bound = lower_bound(&lengths, 1, num_slots, &table) - u64::from(table.slot);
        let blocks = |length: i32| u64::from(u32::try_from(length).unwrap().div_ceil(table.block_tokens));
        let (block, piece, whole) = (u64::from(table.block), u64::from(table.piece), u64::from(table.whole));
        let least = |length: i32| blocks(length) * block + whole.min(2 * piece);
        let total: u64 = lengths.iter().map(|&length| least(length)).sum();
        prop_assert!(bound * u64::try_from(num_slots).unwrap() >= total);
        // Whole, or cut evenly into up to one piece per slot (more pieces than slots only adds to some slot).
        for &length in &lengths {
            let n = blocks(length);
            let slots = u64::try_from(num_slots).unwrap();
            let even = (2..=n.max(2)).map(|k| ceil_u64(n.max(k) * block + k * piece, slots)
                .max(n.div_ceil(k) * block + piece));
            let best = even.chain([n * block + whole]).min().unwrap();
            prop_assert!(bound >= best, "row of {}: {} < {}", length, bound, best);
        }
    }
}

fn ceil_u64(a: u64, b: u64) -> u64 {
    a / b + u64::from(!a.is_multiple_of(b))
}

#[test]
fn balanced_is_near_the_bound_from_128_rows_on() {
    let kernels = [
        CostTable::BF16_HEADS_16,
        CostTable::BF16_FP8_HEADS_16,
        CostTable::GFX942_FP8_HEADS_16,
        CostTable::GFX942_FP8_HEADS_64,
        CostTable::GFX942_FP8_HEADS_128,
        CostTable::GFX950_BF16_HEADS_64,
    ];
    let mut seed = 1_u32;
    let mut mixed = |rows: usize| -> Vec<i32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            1 + i32::try_from(seed >> 21).unwrap()
        };
        (0..rows).map(|_| next()).collect()
    };
    for rows in [128, 200, 256, 512, 1024] {
        for (lengths, most) in [(vec![2048; rows], 1.05), (mixed(rows), 1.10)] {
            for table in kernels {
                for (num_cus, budget) in [(304, 16), (256, 16), (304, -1)] {
                    let params = ScheduleParams {
                        num_cus,
                        max_split_per_batch: budget,
                        fold: 1,
                        variant: Variant::Parallel,
                        empty_rows: EmptyRows::Skip,
                        policy: Policy::Balanced(table),
                    };
                    let quality = schedule(&indptr(&lengths), &params).unwrap().quality(&table);
                    assert!(quality.ratio() <= most, "{rows} rows, {params:?}: {quality:?}");
                }
            }
        }
    }
}

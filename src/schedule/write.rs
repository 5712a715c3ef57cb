//! One schedule by any policy, into arrays that exist.

use super::balanced;
use super::demand::Demand;
use super::fill::write_fill;
use super::invariant::Invariant;
use super::prices::Prices;
use super::sink::{Writer, place_all};
use super::walk::Walk;
use super::{Policy, ScheduleArrays, ScheduleCounts, ScheduleParams};
use crate::PlanError;

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
    write_schedule_near(kv_indptr, params, out, &mut None)
}

/// Does what [`write_schedule`] does, looking for the balanced schedule first where that of the batch before was: `hint` is `None`, or
/// what an earlier call left there. The arrays are the same whatever it says.
pub(crate) fn write_schedule_near(
    kv_indptr: &[i32],
    params: &ScheduleParams,
    out: &mut ScheduleArrays,
    hint: &mut Option<u64>,
) -> Result<ScheduleCounts, PlanError> {
    let demand = Demand::of(kv_indptr, params)?;
    demand.check_outputs(params, out)?;
    let writer = Writer::new(out.work_indptr, out.work_info);
    let reduce = &mut *out.reduce_indptr;
    let fold = params.fold;
    let walk = |writer, reduce| {
        let empty_rows = params.empty_rows_of_policy();
        let (share, variant) = (demand.blocks_per_slot, params.variant);
        place_all(kv_indptr, fold, reduce, || {
            Walk::new(writer, share, variant, empty_rows)
        })
    };
    let (num_works, num_partials) = match params.policy {
        Policy::Aiter => walk(writer, reduce),
        Policy::Balanced(table) => {
            let prices = Prices::of(&table);
            match balanced::capacity(kv_indptr, fold, demand, &prices, hint) {
                Some(capacity) => write_fill(kv_indptr, fold, reduce, writer, capacity, &prices),
                None => walk(writer, reduce),
            }
        }
        Policy::Invariant { table, piece_tokens } => place_all(kv_indptr, fold, reduce, || {
            Invariant::new(writer, kv_indptr, fold, params.num_cus, &table, piece_tokens)
        }),
    };
    Ok(ScheduleCounts {
        num_works,
        num_partials,
        num_slots: demand.num_slots,
        blocks_per_slot: demand.blocks_per_slot,
    })
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::{
        CostTable, EmptyRows, Policy, ScheduleArrays, ScheduleParams, Variant, WORK_WORDS, write_schedule,
    };
    use super::write_schedule_near;
    use crate::PlanError;

    const PARAMS: ScheduleParams = ScheduleParams {
        num_cus: 4,
        max_split_per_batch: -1,
        fold: 2,
        variant: Variant::Serial,
        empty_rows: EmptyRows::Skip,
        policy: Policy::Aiter,
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
    fn no_hint_changes_a_schedule() {
        let mut random = Random(1);
        let mut below = |end| random.below(end);
        // Many rows per slot, about one, and many slots per row. Under aiter's table a candidate is a block.
        let kernel = CostTable::BF16_HEADS_16;
        for (num_cus, table) in [
            (5, kernel),
            (24, CostTable { cut: 9000, ..kernel }),
            (24, CostTable::AITER),
            (700, kernel),
            (700, CostTable::AITER),
        ] {
            let policy = Policy::Balanced(table);
            let params = ScheduleParams {
                num_cus,
                fold: 1,
                policy,
                ..PARAMS
            };
            hints_change_nothing(&params, &mut below);
        }
    }

    /// Plans batches that grow, and others now and then, with the hint that is kept and with any other.
    fn hints_change_nothing(params: &ScheduleParams, below: &mut impl FnMut(u64) -> u64) {
        let most = 120;
        let write = |kv_indptr: &[i32], hint: &mut Option<u64>| {
            let mut made = [
                vec![-7; params.num_cus + 1],
                vec![-7; (most + params.num_cus - 1) * WORK_WORDS],
                vec![-7; most + 1],
            ];
            let [work_indptr, work_info, reduce_indptr] = &mut made;
            let mut out = ScheduleArrays {
                work_indptr,
                work_info,
                reduce_indptr,
            };
            let counts = write_schedule_near(kv_indptr, params, &mut out, hint).unwrap();
            (made, counts)
        };
        let mut lengths = vec![];
        let mut kept = None;
        for step in 0..1000 {
            if step % 40 == 0 {
                let (rows, longest) = (below(most as u64) + 1, 1 << below(12));
                lengths = (0..rows)
                    .map(|_| i32::try_from(below(longest) + 1).unwrap())
                    .collect::<Vec<_>>();
            }
            for length in &mut lengths {
                *length = (*length + 1).min(2048);
            }
            let mut kv_indptr = vec![0];
            for length in &lengths {
                kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + length);
            }
            let expected = write(&kv_indptr, &mut None);
            assert_eq!(write(&kv_indptr, &mut kept), expected, "step {step}");
            let found = kept.unwrap_or(0);
            for hint in [0, found / 2, found + below(1 << 12), below(1 << 20), u64::MAX] {
                assert_eq!(
                    write(&kv_indptr, &mut Some(hint)),
                    expected,
                    "step {step}, {hint}"
                );
            }
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

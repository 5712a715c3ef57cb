//! What a schedule must hold before a kernel may run it.

use super::{EmptyRows, ScheduleParams, WORK_WORDS, to_i64};
use crate::{Expected, PlanError, Rule};

/// Returns the slot and the number of the first empty work that is not the last work of its slot.
///
/// aiter's decode kernels take an empty work (KV start = KV end) for the end of its slot: every later work of that slot
/// is skipped, without a sign. This was seen by executing the kernels of gfx942 and gfx950. As the last work of a slot
/// an empty work does no harm.
///
/// `work_info` holds 8 words per work; works that `work_indptr` names but `work_info` does not hold are passed over.
pub fn first_unsafe_work(work_indptr: &[i32], work_info: &[i32]) -> Option<(usize, usize)> {
    let (works, _) = work_info.as_chunks::<WORK_WORDS>();
    for (slot, bounds) in work_indptr.windows(2).enumerate() {
        let (begin, end) = (index(bounds[0]), index(bounds[1]).min(works.len()));
        // The last work of the slot may be empty.
        let inner = works.get(begin..end.saturating_sub(1)).unwrap_or_default();
        if let Some(at) = inner.iter().position(|work| work[4] == work[5]) {
            return Some((slot, begin + at));
        }
    }
    None
}

/// Whether no work of the schedule is hidden behind an empty one, see [`first_unsafe_work`].
pub fn is_safe(work_indptr: &[i32], work_info: &[i32]) -> bool {
    first_unsafe_work(work_indptr, work_info).is_none()
}

/// Checks that a schedule computes every row exactly once and that no index in it is out of bounds.
///
/// It holds for any schedule of the rows of `kv_indptr`, not only for aiter's: pieces may end anywhere and lie in any
/// slot. What is checked:
///
/// - `work_indptr` has `num_cus + 1` entries, starts at 0 and does not decrease; `work_info` holds that many works and
///   `reduce_indptr` at least `tiles + 1` entries, which start at 0 and do not decrease;
/// - each work names its own tile as tile and as query (kernels of gfx950 take the causal limit from there), and what
///   is left of the row behind it;
/// - the pieces of a row come in ascending order, without a gap or an overlap, and cover it;
/// - a row in one piece has no partial location; the pieces of a cut row have the locations of the tile's range in
///   `reduce_indptr`, in order, which also makes all locations distinct;
/// - a row of length 0 has no work, or with [`EmptyRows::Aiter`] at most one.
///
/// # Errors
///
/// The first violation: [`PlanError::Length`], or [`PlanError::Entry`] with the position in the array at fault. A row that
/// is not covered to its end is reported as `row end`, by tile. Parameters and `kv_indptr` are checked as by
/// [`super::write_schedule`].
pub fn check(
    kv_indptr: &[i32],
    params: &ScheduleParams,
    work_indptr: &[i32],
    work_info: &[i32],
    reduce_indptr: &[i32],
) -> Result<(), PlanError> {
    let demand = super::demand::Demand::of(kv_indptr, params)?;
    let slots = params.num_cus + 1;
    if work_indptr.len() != slots {
        let expected = Expected::Exactly(slots);
        return Err(PlanError::Length {
            argument: "work_indptr",
            actual: work_indptr.len(),
            expected,
        });
    }
    if reduce_indptr.len() <= demand.tiles {
        let expected = Expected::AtLeast(demand.tiles + 1);
        return Err(PlanError::Length {
            argument: "reduce_indptr",
            actual: reduce_indptr.len(),
            expected,
        });
    }
    let num_works = check_running_sum("work_indptr", work_indptr)?;
    check_running_sum("reduce_indptr", reduce_indptr)?;
    let Some(words) = work_info.get(..num_works.saturating_mul(WORK_WORDS)) else {
        let expected = Expected::AtLeast(num_works.saturating_mul(WORK_WORDS));
        return Err(PlanError::Length {
            argument: "work_info",
            actual: work_info.len(),
            expected,
        });
    };
    let mut tiles: Vec<Tile> = Vec::with_capacity(demand.tiles);
    for bounds in kv_indptr.windows(2) {
        let (start, end) = (bounds[0] - kv_indptr[0], bounds[1] - kv_indptr[0]);
        for _ in 0..params.fold {
            let partials = &reduce_indptr[tiles.len()..tiles.len() + 2];
            tiles.push(Tile {
                next_position: start,
                end,
                next_partial: partials[0],
                end_partial: partials[1],
                works: 0,
                empty: start == end,
            });
        }
    }
    for (work, words) in words.as_chunks::<WORK_WORDS>().0.iter().enumerate() {
        check_work(work, words, &mut tiles, params)?;
    }
    for (index, tile) in tiles.iter().enumerate() {
        expect("row end", index, tile.next_position, Rule::Equal(tile.end.into()))?;
        expect(
            "partials of tile",
            index,
            tile.next_partial,
            Rule::Equal(tile.end_partial.into()),
        )?;
    }
    Ok(())
}

/// How far a tile has been covered.
struct Tile {
    next_position: i32,
    end: i32,
    next_partial: i32,
    end_partial: i32,
    works: usize,
    empty: bool,
}

fn check_work(
    work: usize,
    words: &[i32; WORK_WORDS],
    tiles: &mut [Tile],
    params: &ScheduleParams,
) -> Result<(), PlanError> {
    let keep = |at: usize, rule| expect("work_info", work * WORK_WORDS + at, words[at], rule);
    let [row, location, _, _, start, end, ..] = *words;
    keep(0, Rule::AtLeast(0))?;
    let most = to_i64(tiles.len()) - 1;
    let Some(tile) = tiles.get_mut(index(row)) else {
        return keep(0, Rule::AtMost(most));
    };
    keep(2, Rule::Equal(row.into()))?;
    keep(3, Rule::Equal(i64::from(row) + 1))?;
    keep(4, Rule::Equal(tile.next_position.into()))?;
    if tile.empty {
        // Its one work, where it may have one, is empty too.
        keep(5, Rule::Equal(start.into()))?;
        let allowed = usize::from(params.empty_rows_of_policy() == EmptyRows::Aiter);
        if tile.works >= allowed {
            return Err(PlanError::Entry {
                argument: "works of empty row",
                index: index(row),
                value: to_i64(tile.works) + 1,
                rule: Rule::AtMost(to_i64(allowed)),
            });
        }
    } else {
        keep(5, Rule::AtLeast(i64::from(start) + 1))?;
        keep(5, Rule::AtMost(tile.end.into()))?;
    }
    keep(6, Rule::Equal(i64::from(tile.end) - i64::from(end)))?;
    keep(7, Rule::Equal(0))?;
    let whole = tile.works == 0 && end == tile.end;
    if whole {
        keep(1, Rule::Equal(-1))?;
    } else {
        keep(1, Rule::Equal(tile.next_partial.into()))?;
        keep(1, Rule::AtMost(i64::from(tile.end_partial) - 1))?;
        tile.next_partial = location + 1;
    }
    tile.next_position = end;
    tile.works += 1;
    Ok(())
}

/// Checks that the array starts at 0 and does not decrease; returns its last entry.
fn check_running_sum(argument: &'static str, array: &[i32]) -> Result<usize, PlanError> {
    let mut previous = 0;
    for (index, &value) in array.iter().enumerate() {
        let rule = if index == 0 {
            Rule::Equal(0)
        } else {
            Rule::NotBelowPrevious(previous.into())
        };
        expect(argument, index, value, rule)?;
        previous = value;
    }
    Ok(index(previous))
}

fn expect(argument: &'static str, index: usize, value: i32, rule: Rule) -> Result<(), PlanError> {
    let value = i64::from(value);
    let kept = match rule {
        Rule::Equal(other) => value == other,
        Rule::AtLeast(least) | Rule::NotBelowPrevious(least) | Rule::NotBelowQueryLength(least) => {
            value >= least
        }
        Rule::AtMost(most) => value <= most,
        Rule::MinusOneOrPositive => value == -1 || value > 0,
    };
    if kept {
        Ok(())
    } else {
        Err(PlanError::Entry {
            argument,
            index,
            value,
            rule,
        })
    }
}

/// An entry as an index; a negative one counts as 0 and is found by other checks.
fn index(value: i32) -> usize {
    usize::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::{Policy, Schedule, Variant, schedule};
    use super::*;

    const SKIP: ScheduleParams = ScheduleParams {
        num_cus: 4,
        max_split_per_batch: -1,
        fold: 1,
        variant: Variant::Serial,
        empty_rows: EmptyRows::Skip,
        policy: Policy::Aiter,
    };
    const AITER: ScheduleParams = ScheduleParams {
        num_cus: 2,
        empty_rows: EmptyRows::Aiter,
        ..SKIP
    };

    fn indptr(lengths: &[i32]) -> Vec<i32> {
        let ends = lengths.iter().scan(0, |total, length| {
            *total += length;
            Some(*total)
        });
        std::iter::once(0).chain(ends).collect()
    }

    fn verdict(kv_indptr: &[i32], schedule: &Schedule) -> Result<(), PlanError> {
        check(
            kv_indptr,
            &schedule.params,
            &schedule.work_indptr,
            &schedule.work_info,
            &schedule.reduce_indptr,
        )
    }

    #[test]
    fn empty_works_inside_a_slot_are_found() {
        for lengths in [&[16, 0, 16, 0, 16, 0, 16][..], &[40, 0, 17, 33]] {
            let kv_indptr = indptr(lengths);
            let serial = schedule(&kv_indptr, &AITER).unwrap();
            let (slot, work) = first_unsafe_work(&serial.work_indptr, &serial.work_info).unwrap();
            assert_eq!((slot, serial.work_info[work * WORK_WORDS]), (0, 1), "{lengths:?}");
            assert_eq!(verdict(&kv_indptr, &serial), Ok(()));
            let skipped = schedule(&kv_indptr, &ScheduleParams { num_cus: 2, ..SKIP }).unwrap();
            assert!(is_safe(&skipped.work_indptr, &skipped.work_info));
        }
    }

    #[test]
    fn empty_work_at_the_end_of_a_slot_is_safe() {
        let info = [
            [0, -1, 0, 1, 0, 16, 0, 0],
            [1, -1, 1, 2, 16, 16, 0, 0],
            [2, -1, 2, 3, 16, 20, 0, 0],
        ];
        assert!(is_safe(&[0, 2, 3], info.as_flattened()));
        assert_eq!(first_unsafe_work(&[0, 0, 3], info.as_flattened()), Some((1, 1)));
        assert!(is_safe(&[0, 2], &info.as_flattened()[..3]));
        assert!(is_safe(&[], &[]));
        assert!(is_safe(&[0, -5, i32::MAX], info[..1].as_flattened()));
    }

    #[test]
    fn any_changed_word_is_found() {
        let kv_indptr = indptr(&[300, 0, 16, 700, 1]);
        let good = schedule(&kv_indptr, &SKIP).unwrap();
        assert_eq!(verdict(&kv_indptr, &good), Ok(()));
        for delta in [-1, 1, 16, -16, i32::MIN] {
            for at in 0..good.work_info.len() {
                let mut bad = good.clone();
                bad.work_info[at] = bad.work_info[at].wrapping_add(delta);
                assert!(verdict(&kv_indptr, &bad).is_err(), "work_info[{at}] by {delta}");
            }
            for at in 0..good.reduce_indptr.len() {
                let mut bad = good.clone();
                bad.reduce_indptr[at] = bad.reduce_indptr[at].wrapping_add(delta);
                assert!(
                    verdict(&kv_indptr, &bad).is_err(),
                    "reduce_indptr[{at}] by {delta}"
                );
            }
        }
    }

    #[test]
    fn missing_and_repeated_works_are_found() {
        let kv_indptr = indptr(&[300, 0, 16, 700, 1]);
        let good = schedule(&kv_indptr, &SKIP).unwrap();
        for work in 0..good.counts.num_works {
            let mut missing = good.clone();
            missing
                .work_info
                .drain(work * WORK_WORDS..(work + 1) * WORK_WORDS);
            assert!(verdict(&kv_indptr, &missing).is_err());
            for entry in &mut missing.work_indptr {
                *entry = (*entry).min(i32::try_from(good.counts.num_works).unwrap() - 1);
            }
            assert!(verdict(&kv_indptr, &missing).is_err());
        }
        let mut repeated = good.clone();
        let last = repeated.work_info[repeated.work_info.len() - WORK_WORDS..].to_vec();
        repeated.work_info.extend(last);
        *repeated.work_indptr.last_mut().unwrap() += 1;
        assert!(verdict(&kv_indptr, &repeated).is_err());
    }

    #[test]
    fn empty_row_has_work_only_where_allowed() {
        let kv_indptr = indptr(&[16, 0]);
        let mut aiter = schedule(&kv_indptr, &AITER).unwrap();
        assert_eq!(aiter.counts.num_works, 2);
        assert_eq!(verdict(&kv_indptr, &aiter), Ok(()));
        aiter.params.empty_rows = EmptyRows::Skip;
        assert!(verdict(&kv_indptr, &aiter).is_err());
    }

    #[test]
    fn broken_arrays_are_refused_without_a_panic() {
        let kv_indptr = indptr(&[300, 16]);
        let good = schedule(&kv_indptr, &SKIP).unwrap();
        let info = &good.work_info[..];
        for work_indptr in [
            &[][..],
            &[0; 4],
            &[0; 6],
            &[1, 1, 2, 3, 4],
            &[0, 2, 1, 3, 4],
            &[0, 1, 2, 3, i32::MAX],
        ] {
            assert!(check(&kv_indptr, &SKIP, work_indptr, info, &good.reduce_indptr).is_err());
        }
        assert!(
            check(
                &kv_indptr,
                &SKIP,
                &good.work_indptr,
                &info[1..],
                &good.reduce_indptr
            )
            .is_err()
        );
        assert!(
            check(
                &kv_indptr,
                &SKIP,
                &good.work_indptr,
                info,
                &good.reduce_indptr[1..]
            )
            .is_err()
        );
    }
}

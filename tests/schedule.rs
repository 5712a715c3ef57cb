//! The schedule against an oracle written from aiter's definition, and what holds for every schedule.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is a failed test"
)]

use mlaplan::schedule::{
    EmptyRows, Policy, Schedule, ScheduleArrays, ScheduleParams, Variant, WORK_WORDS, check,
    first_unsafe_work, is_safe, schedule, write_schedule,
};
use proptest::prelude::*;

/// Failures are reported with their input; nothing is written beside the tests.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// One piece of one tile: block range `[from, to)` of the row, in slot `slot`.
#[derive(Debug, Clone, Copy)]
struct Piece {
    tile: i64,
    slot: i64,
    from: i64,
    to: i64,
}

/// The arrays that the oracle makes, works as rows.
#[derive(Debug, PartialEq)]
struct Arrays {
    num_slots: i64,
    blocks_per_slot: i64,
    work_indptr: Vec<i64>,
    works: Vec<[i64; 8]>,
    reduce_indptr: Vec<i64>,
    final_map: Vec<[i64; 2]>,
    partial_map: Vec<i64>,
}

fn ceil_div(a: i64, b: i64) -> i64 {
    a.div_euclid(b) + i64::from(a.rem_euclid(b) != 0)
}

/// The pieces of the walk in its stated form: slot number and remaining payload, the fresh slots of a row at once.
fn oracle_pieces(blocks: &[i64], num_slots: i64, variant: Variant) -> (i64, Vec<Piece>) {
    const V: i64 = 16;
    let c = ceil_div(blocks.iter().map(|n| n + V).sum(), num_slots);
    let payload = c + V;
    let (mut slot, mut rest) = (0, payload);
    let mut pieces = Vec::new();
    for (tile, &n) in (0..).zip(blocks) {
        if n + V <= rest {
            pieces.push(Piece {
                tile,
                slot,
                from: 0,
                to: n,
            });
            rest -= n + V;
        } else if n == 0 {
            match variant {
                Variant::Parallel => rest = 0,
                Variant::Serial => {
                    slot += 1;
                    pieces.push(Piece {
                        tile,
                        slot,
                        from: 0,
                        to: 0,
                    });
                    rest = payload - V;
                }
            }
        } else {
            let head = if rest > V { rest - V } else { 0 };
            if head > 0 {
                pieces.push(Piece {
                    tile,
                    slot,
                    from: 0,
                    to: head,
                });
            }
            let fresh = ceil_div(n - head, c);
            for k in 0..fresh {
                let from = head + k * c;
                pieces.push(Piece {
                    tile,
                    slot: slot + k + 1,
                    from,
                    to: n.min(from + c),
                });
            }
            let last = n - head - (fresh - 1) * c;
            slot += fresh;
            rest = c - last;
        }
    }
    (c, pieces)
}

/// aiter's schedule from its definition. With `EmptyRows::Skip`: the schedule of the other rows, tiles renamed.
fn oracle(lengths: &[i32], params: &ScheduleParams) -> Arrays {
    let mut start = 0;
    let mut tiles = Vec::new(); // (tile, start, length) of the tiles that take part
    let mut num_tiles = 0;
    for &length in lengths {
        for _ in 0..params.fold {
            if length > 0 || params.empty_rows == EmptyRows::Aiter {
                tiles.push((num_tiles, start, i64::from(length)));
            }
            num_tiles += 1;
        }
        start += i64::from(length);
    }
    let num_cus = i64::try_from(params.num_cus).unwrap();
    let count = i64::try_from(tiles.len()).unwrap();
    let budget = i64::from(params.max_split_per_batch);
    let num_slots = if budget < 0 {
        num_cus
    } else {
        num_cus.min(budget * count)
    };
    let blocks: Vec<i64> = tiles.iter().map(|tile| ceil_div(tile.2, 16)).collect();
    let (blocks_per_slot, pieces) = if tiles.is_empty() {
        (0, vec![])
    } else {
        oracle_pieces(&blocks, num_slots, params.variant)
    };

    let pieces_of = |tile: i64| {
        pieces
            .iter()
            .skip_while(|p| p.tile < tile)
            .take_while(|p| p.tile == tile)
            .count()
    };
    let mut per_tile = vec![0; usize::try_from(num_tiles).unwrap()];
    let mut works = Vec::new();
    let mut location = 0;
    for piece in &pieces {
        let index = usize::try_from(piece.tile).unwrap();
        let (tile, start, length) = tiles[index];
        let cut = pieces_of(piece.tile) > 1;
        let (from, to) = (
            start + 16 * piece.from,
            (start + 16 * piece.to).min(start + length),
        );
        works.push([
            tile,
            if cut { location } else { -1 },
            tile,
            tile + 1,
            from,
            to,
            start + length - to,
            0,
        ]);
        if cut {
            location += 1;
            per_tile[usize::try_from(tile).unwrap()] += 1;
        }
    }
    let before = |slot: i64| i64::try_from(pieces.iter().filter(|p| p.slot < slot).count()).unwrap();
    let mut reduce_indptr = vec![0];
    for pieces in &per_tile {
        reduce_indptr.push(reduce_indptr[reduce_indptr.len() - 1] + pieces);
    }
    let final_map = (0..)
        .zip(&per_tile)
        .map(|(t, &k)| if k > 0 { [t, t + 1] } else { [-1, -1] });
    Arrays {
        num_slots,
        blocks_per_slot,
        work_indptr: (0..=num_cus).map(before).collect(),
        works,
        reduce_indptr,
        final_map: final_map.collect(),
        partial_map: (0..location).collect(),
    }
}

fn widen(array: &[i32]) -> Vec<i64> {
    array.iter().map(|&entry| i64::from(entry)).collect()
}

fn arrays_of(schedule: &Schedule) -> Arrays {
    let works = schedule.work_info.as_chunks::<WORK_WORDS>().0;
    Arrays {
        num_slots: i64::try_from(schedule.counts.num_slots).unwrap(),
        blocks_per_slot: schedule.counts.blocks_per_slot,
        work_indptr: widen(&schedule.work_indptr),
        works: works.iter().map(|work| work.map(i64::from)).collect(),
        reduce_indptr: widen(&schedule.reduce_indptr),
        final_map: schedule
            .reduce_final_map
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| pair.map(i64::from))
            .collect(),
        partial_map: widen(&schedule.reduce_partial_map),
    }
}

fn indptr(first: i32, lengths: &[i32]) -> Vec<i32> {
    let mut entries = vec![first];
    for length in lengths {
        entries.push(entries[entries.len() - 1] + length);
    }
    entries
}

fn verdict(kv_indptr: &[i32], made: &Schedule) -> Result<(), mlaplan::PlanError> {
    check(
        kv_indptr,
        &made.params,
        &made.work_indptr,
        &made.work_info,
        &made.reduce_indptr,
    )
}

/// Rows of one kind: full, near block edges, short, long, or everything up to 2048.
fn live_length() -> impl Strategy<Value = i32> {
    prop_oneof![
        Just(2048),
        Just(1),
        (1..130_i32).prop_map(|blocks| 16 * blocks),
        (1..130_i32, prop_oneof![Just(-1), Just(1)]).prop_map(|(blocks, off)| 16 * blocks + off),
        1..40_i32,
        1..2049_i32,
        1..200_000_i32,
    ]
}

fn live_lengths() -> impl Strategy<Value = Vec<i32>> {
    prop_oneof![
        prop::collection::vec(live_length(), 0..60),
        (live_length(), 0..200_usize).prop_map(|(length, rows)| vec![length; rows]),
    ]
}

/// Live rows with empty ones among them, from none to nearly all.
fn lengths() -> impl Strategy<Value = Vec<i32>> {
    (0..100_u32).prop_flat_map(|percent| {
        let row =
            (0..100_u32, live_length()).prop_map(move |(p, length)| if p < percent { 0 } else { length });
        prop::collection::vec(row, 0..60)
    })
}

fn any_params() -> impl Strategy<Value = ScheduleParams> {
    let num_cus = prop_oneof![1..12_usize, Just(80), Just(228), Just(256), Just(304)];
    let budget = prop_oneof![Just(-1), 1..20_i32, Just(i32::MAX)];
    let fold = prop_oneof![Just(1_usize), Just(2), Just(3), Just(8)];
    let variant = prop_oneof![Just(Variant::Parallel), Just(Variant::Serial)];
    let empty_rows = prop_oneof![Just(EmptyRows::Aiter), Just(EmptyRows::Skip)];
    (num_cus, budget, fold, variant, empty_rows).prop_map(
        |(num_cus, max_split_per_batch, fold, variant, empty_rows)| ScheduleParams {
            num_cus,
            max_split_per_batch,
            fold,
            variant,
            empty_rows,
            policy: Policy::Aiter,
        },
    )
}

proptest! {
    #![proptest_config(config(500))]

    #[test]
    fn schedule_is_the_definition(lengths in lengths(), params in any_params(), first in 0..1000_i32) {
        let kv_indptr = indptr(first, &lengths);
        let made = schedule(&kv_indptr, &params).unwrap();
        prop_assert_eq!(arrays_of(&made), oracle(&lengths, &params));
        prop_assert_eq!(&made.row_lengths, &lengths);
        prop_assert_eq!(verdict(&kv_indptr, &made), Ok(()));
    }

    #[test]
    fn works_keep_their_bounds(lengths in lengths(), params in any_params()) {
        let counts = schedule(&indptr(0, &lengths), &params).unwrap().counts;
        let tiles = lengths.len() * params.fold;
        let slots = counts.num_slots;
        prop_assert!(slots <= params.num_cus);
        prop_assert!(counts.num_works < (tiles + slots).max(1));
        prop_assert!(counts.num_partials <= (tiles + slots).saturating_sub(1).min(2 * slots.saturating_sub(1)));
    }

    #[test]
    fn variants_and_empty_rows_differ_only_on_empty_rows(lengths in live_lengths(), params in any_params()) {
        let kv_indptr = indptr(0, &lengths);
        let made = arrays_of(&schedule(&kv_indptr, &params).unwrap());
        for variant in [Variant::Parallel, Variant::Serial] {
            for empty_rows in [EmptyRows::Aiter, EmptyRows::Skip] {
                let other = ScheduleParams { variant, empty_rows, ..params };
                prop_assert_eq!(&made, &arrays_of(&schedule(&kv_indptr, &other).unwrap()));
            }
        }
    }

    #[test]
    fn skipping_empty_rows_is_always_safe(lengths in lengths(), params in any_params()) {
        let params = ScheduleParams { empty_rows: EmptyRows::Skip, ..params };
        let made = schedule(&indptr(0, &lengths), &params).unwrap();
        prop_assert!(is_safe(&made.work_indptr, &made.work_info));
        let works = made.work_info.as_chunks::<WORK_WORDS>().0;
        prop_assert!(works.iter().all(|work| work[4] < work[5]));
    }

    #[test]
    fn unsafe_work_is_the_first_that_hides_another(lengths in lengths(), params in any_params()) {
        let params = ScheduleParams { empty_rows: EmptyRows::Aiter, ..params };
        let made = schedule(&indptr(0, &lengths), &params).unwrap();
        let found = first_unsafe_work(&made.work_indptr, &made.work_info);
        prop_assert_eq!(found.is_none(), is_safe(&made.work_indptr, &made.work_info));
        // Runs every slot as the kernels do, and counts the works that are never reached.
        let works = made.work_info.as_chunks::<WORK_WORDS>().0;
        let mut first_hiding = None;
        for slot in 0..params.num_cus {
            let bounds = [slot, slot + 1].map(|at| usize::try_from(made.work_indptr[at]).unwrap());
            let mut work = bounds[0];
            while work < bounds[1] && works[work][4] != works[work][5] {
                work += 1;
            }
            if work + 1 < bounds[1] {
                first_hiding = first_hiding.or(Some((slot, work)));
            }
        }
        prop_assert_eq!(found, first_hiding);
    }

    #[test]
    fn writing_in_place_touches_only_what_it_says(
        lengths in lengths(), params in any_params(), spare in 0..20_usize,
    ) {
        let kv_indptr = indptr(0, &lengths);
        let made = schedule(&kv_indptr, &params).unwrap();
        let tiles = lengths.len() * params.fold;
        let mut work_indptr = vec![-7; params.num_cus + 1];
        let mut work_info = vec![-7; (tiles + params.num_cus - 1) * WORK_WORDS + spare];
        let mut reduce_indptr = vec![-7; tiles + 1 + spare];
        let mut out = ScheduleArrays {
            work_indptr: &mut work_indptr, work_info: &mut work_info, reduce_indptr: &mut reduce_indptr,
        };
        prop_assert_eq!(write_schedule(&kv_indptr, &params, &mut out), Ok(made.counts));
        prop_assert_eq!(&work_indptr, &made.work_indptr);
        let (live, behind) = work_info.split_at(made.counts.num_works * WORK_WORDS);
        prop_assert_eq!(live, &made.work_info[..]);
        prop_assert!(behind.iter().all(|&entry| entry == -7));
        prop_assert_eq!(&reduce_indptr[..=tiles], &made.reduce_indptr[..]);
        let total = reduce_indptr[tiles];
        prop_assert!(reduce_indptr[tiles..].iter().all(|&entry| entry == total));
    }

    #[test]
    fn no_input_panics(
        kv_indptr in prop_oneof![
            prop::collection::vec(any::<i32>(), 0..6),
            prop::collection::vec(any::<u32>().prop_map(|entry| i32::try_from(entry >> 1).unwrap()), 0..6)
                .prop_map(|mut entries| { entries.sort_unstable(); entries }),
        ],
        num_cus in prop_oneof![0..400_usize, Just(usize::MAX)],
        max_split_per_batch in prop_oneof![-3..20_i32, any::<i32>()],
        fold in prop_oneof![0..130_usize, any::<usize>()],
        lens in prop::array::uniform3(0..5000_usize),
    ) {
        for (variant, empty_rows) in [(Variant::Parallel, EmptyRows::Aiter), (Variant::Serial, EmptyRows::Skip)] {
            let params = ScheduleParams {
                num_cus, max_split_per_batch, fold, variant, empty_rows, policy: Policy::Aiter,
            };
            if let Ok(made) = schedule(&kv_indptr, &params) {
                prop_assert_eq!(verdict(&kv_indptr, &made), Ok(()));
            }
            let mut arrays = lens.map(|len| vec![0; len]);
            let [work_indptr, work_info, reduce_indptr] = &mut arrays;
            let mut out = ScheduleArrays { work_indptr, work_info, reduce_indptr };
            let _ = write_schedule(&kv_indptr, &params, &mut out);
            let _ = check(&kv_indptr, &params, &arrays[0], &arrays[1], &arrays[2]);
        }
    }
}

const PARAMS: ScheduleParams = ScheduleParams {
    num_cus: 304,
    max_split_per_batch: -1,
    fold: 1,
    variant: Variant::Parallel,
    empty_rows: EmptyRows::Aiter,
    policy: Policy::Aiter,
};

/// Works per row.
fn works_per_row(lengths: &[i32], params: &ScheduleParams) -> Vec<usize> {
    let made = schedule(&indptr(0, lengths), params).unwrap();
    let works = made.work_info.as_chunks::<WORK_WORDS>().0;
    (0_i32..)
        .zip(lengths)
        .map(|(row, _)| works.iter().filter(|work| work[0] == row).count())
        .collect()
}

#[test]
fn reported_batches_with_empty_rows_give_what_was_reported() {
    assert_eq!(works_per_row(&[16, 0, 0, 0], &PARAMS), [1, 0, 0, 0]);
    assert_eq!(works_per_row(&[2048, 0, 2048], &PARAMS)[1], 0);
    assert_eq!(works_per_row(&[2048, 1, 2048], &PARAMS), [64, 1, 64]);
    assert_eq!(works_per_row(&[16, 1, 1, 1], &PARAMS), [1, 1, 1, 1]);
    assert_eq!(
        works_per_row(&[0; 6], &ScheduleParams { num_cus: 8, ..PARAMS })
            .iter()
            .sum::<usize>(),
        1
    );
    let serial = ScheduleParams {
        num_cus: 8,
        variant: Variant::Serial,
        ..PARAMS
    };
    assert_eq!(works_per_row(&[0; 6], &serial), [1; 6]);
    let skip = ScheduleParams {
        empty_rows: EmptyRows::Skip,
        ..PARAMS
    };
    assert_eq!(works_per_row(&[2048, 0, 2048], &skip), [128, 0, 128]);
}

#[test]
fn reported_budgets_give_what_was_reported() {
    let budget = |max_split_per_batch| ScheduleParams {
        max_split_per_batch,
        ..PARAMS
    };
    assert_eq!(works_per_row(&[2048], &budget(-1)), [128]);
    assert_eq!(works_per_row(&[2048], &budget(4)), [4]);
    // A budget is no limit per row.
    assert_eq!(works_per_row(&[2048, 16, 16, 16], &budget(1))[0], 3);
    for max_split_per_batch in [-1, 4] {
        assert_eq!(
            works_per_row(&[2048; 256], &budget(max_split_per_batch))
                .iter()
                .sum::<usize>(),
            512
        );
    }
    let two = ScheduleParams {
        num_cus: 256,
        ..budget(16)
    };
    assert_eq!(works_per_row(&[2048; 2], &two).iter().sum::<usize>(), 30);
    // No more pieces than blocks.
    assert_eq!(works_per_row(&[20], &budget(16)), [1]);
    assert!(
        works_per_row(&[20; 3], &budget(16))
            .iter()
            .all(|&works| works <= 2)
    );
}

#[test]
fn padding_rows_take_slots_from_live_ones_unless_skipped() {
    let slots_used = |padding: usize, empty_rows| {
        let lengths = [vec![2048; 8], vec![0; padding]].concat();
        let made = schedule(&indptr(0, &lengths), &ScheduleParams { empty_rows, ..PARAMS }).unwrap();
        // Slots with a work that is not empty.
        let works = made.work_info.as_chunks::<WORK_WORDS>().0;
        let live = |bounds: &[i32]| works[range(bounds)].iter().any(|work| work[4] < work[5]);
        made.work_indptr.windows(2).filter(|bounds| live(bounds)).count()
    };
    assert_eq!(
        [0, 56, 504].map(|padding| slots_used(padding, EmptyRows::Aiter)),
        [256, 152, 36]
    );
    assert_eq!(
        [0, 56, 504].map(|padding| slots_used(padding, EmptyRows::Skip)),
        [256, 256, 256]
    );
}

fn range(bounds: &[i32]) -> std::ops::Range<usize> {
    usize::try_from(bounds[0]).unwrap()..usize::try_from(bounds[1]).unwrap()
}

#[test]
fn many_rows_need_no_limit_of_shared_memory() {
    let kv_indptr = indptr(0, &vec![100; 16_384]);
    let made = schedule(&kv_indptr, &ScheduleParams { fold: 8, ..PARAMS }).unwrap();
    assert!(made.counts.num_works < 16_384 * 8 + 304);
    assert_eq!(verdict(&kv_indptr, &made), Ok(()));
}

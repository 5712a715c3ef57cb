//! The policies `balanced` and `invariant` against an oracle written from their definitions in `docs/design.md`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, where a panic is a failed test"
)]

use mlaplan::schedule::quality::finish_time;
use mlaplan::schedule::{
    CostTable, EmptyRows, Policy, Schedule, ScheduleArrays, ScheduleParams, Variant, WORK_WORDS, check,
    cost::MAX_COST, is_safe, schedule, write_schedule,
};
use proptest::prelude::*;

mod oracle;

use oracle::{balanced, choice, invariant, is_cut, slots, tiles, works_of};

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

fn length() -> impl Strategy<Value = i32> {
    prop_oneof![
        3 => Just(2048),
        2 => Just(0),
        2 => Just(1),
        3 => 1..40_i32,
        3 => (1..130_i32, -1..2_i32).prop_map(|(blocks, off)| 16 * blocks + off),
        3 => 1..2049_i32,
        1 => 1..200_000_i32,
    ]
}

fn lengths() -> impl Strategy<Value = Vec<i32>> {
    prop_oneof![
        3 => prop::collection::vec(length(), 0..50),
        1 => (length(), 0..200_usize).prop_map(|(length, rows)| vec![length; rows]),
        1 => (1..100_i32, 0..60_usize).prop_map(|(length, rows)| {
            let mut lengths = vec![length; rows];
            lengths.push(100_000);
            lengths
        }),
    ]
}

const KERNELS: [CostTable; 7] = [
    CostTable::AITER,
    CostTable::BF16_HEADS_16,
    CostTable::BF16_FP8_HEADS_16,
    CostTable::GFX942_FP8_HEADS_16,
    CostTable::GFX942_FP8_HEADS_64,
    CostTable::GFX942_FP8_HEADS_128,
    CostTable::GFX950_BF16_HEADS_64,
];

/// A cost: 0, tiny, like a kernel's, or as large as there may be.
fn cost() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0_u32),
        0..4_u32,
        0..200_u32,
        1000..40_000_u32,
        (MAX_COST - 3)..=MAX_COST,
        0..=MAX_COST
    ]
}

/// Any table that a policy takes, with `piece` at its limit in a fifth of them.
fn table() -> impl Strategy<Value = CostTable> {
    let block_tokens = prop_oneof![
        Just(16_u32),
        Just(64),
        Just(1),
        1..100_u32,
        Just(i32::MAX.unsigned_abs())
    ];
    let costs = prop::array::uniform6(cost());
    let free = (block_tokens, costs, 0..5_u8).prop_map(
        |(block_tokens, [block, piece, whole, slot, merge, cut], at_limit)| {
            let block = block.max(1);
            let most = (whole + block).min(MAX_COST);
            let piece = if at_limit == 0 { most } else { piece.min(most) };
            CostTable {
                block_tokens,
                block,
                piece,
                whole,
                slot,
                merge,
                cut,
            }
        },
    );
    let kernel = (prop::sample::select(&KERNELS), cost()).prop_map(|(table, cut)| CostTable { cut, ..table });
    prop_oneof![2 => free, 1 => kernel, 1 => prop::sample::select(&KERNELS)]
}

fn any_params() -> impl Strategy<Value = ScheduleParams> {
    let num_cus = prop_oneof![1..12_usize, Just(80), Just(256), Just(304)];
    let budget = prop_oneof![Just(-1), 1..40_i32, Just(i32::MAX)];
    let fold = prop_oneof![4 => Just(1_usize), 1 => Just(2), 1 => Just(3), 1 => Just(8)];
    (num_cus, budget, fold, any::<bool>()).prop_map(|(num_cus, max_split_per_batch, fold, aiter)| {
        ScheduleParams {
            num_cus,
            max_split_per_batch,
            fold,
            variant: if aiter { Variant::Serial } else { Variant::Parallel },
            empty_rows: if aiter { EmptyRows::Aiter } else { EmptyRows::Skip },
            policy: Policy::Aiter,
        }
    })
}

fn piece_tokens() -> impl Strategy<Value = i32> {
    prop_oneof![1..200_i32, Just(512), Just(2048), Just(i32::MAX)]
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(1000))]

    #[test]
    fn balanced_is_its_definition(
        lengths in lengths(), params in any_params(), table in table(), first in 0..1000_i32,
    ) {
        let kv_indptr = indptr(first, &lengths);
        let params = ScheduleParams { policy: Policy::Balanced(table), ..params };
        let made = schedule(&kv_indptr, &params).unwrap();
        prop_assert_eq!(works_of(&made), balanced(&kv_indptr, &params, &table).0);
        prop_assert_eq!(verdict(&kv_indptr, &made), Ok(()));
        prop_assert!(is_safe(&made.work_indptr, &made.work_info));
        let slots = slots(&tiles(&lengths, params.fold), &params);
        prop_assert_eq!(i128::try_from(made.counts.num_slots).unwrap(), slots);
        prop_assert!(made.counts.num_works < (lengths.len() * params.fold + made.counts.num_slots).max(1));
    }

    #[test]
    fn invariant_is_its_definition(
        lengths in lengths(), params in any_params(), table in table(), g in piece_tokens(), first in 0..1000_i32,
    ) {
        let g = if g < 64 && lengths.iter().any(|&length| length > 20_000) { 64 * g } else { g };
        let kv_indptr = indptr(first, &lengths);
        let params = ScheduleParams { policy: Policy::Invariant { table, piece_tokens: g }, ..params };
        let made = schedule(&kv_indptr, &params).unwrap();
        prop_assert_eq!(works_of(&made), invariant(&kv_indptr, &params, &table, g));
        prop_assert_eq!(verdict(&kv_indptr, &made), Ok(()));
        prop_assert!(is_safe(&made.work_indptr, &made.work_info));
        prop_assert_eq!(made.counts.num_slots, params.num_cus);
        let topk = lengths.iter().copied().max().unwrap_or(1).max(1);
        let most = params.policy.max_works(lengths.len() * params.fold, params.num_cus, topk);
        prop_assert!(made.counts.num_works <= most);
    }

    #[test]
    fn balanced_is_never_worse_than_aiter(lengths in lengths(), params in any_params(), table in table()) {
        let kv_indptr = indptr(0, &lengths);
        let params = ScheduleParams { empty_rows: EmptyRows::Skip, ..params };
        let walk = schedule(&kv_indptr, &params).unwrap();
        let params = ScheduleParams { policy: Policy::Balanced(table), ..params };
        let balanced = schedule(&kv_indptr, &params).unwrap();
        let [aiter, made] = [&walk, &balanced].map(|one| one.quality(&table));
        let cuts = [&walk, &balanced].map(|one| is_cut(&works_of(one)));
        if table.cut == 0 || cuts[1] || !cuts[0] {
            prop_assert!(made.finish_time <= aiter.finish_time, "{:?} {:?}", made, aiter);
        }
        // The merge included, as far as having one costs.
        let with_cut = |one: &Schedule| {
            let cut = if is_cut(&works_of(one)) { u64::from(table.cut) } else { 0 };
            one.quality(&table).finish_time + cut
        };
        prop_assert!(with_cut(&balanced) <= with_cut(&walk));
        prop_assert!(made.finish_time >= made.lower_bound, "{:?}", made);
        prop_assert_eq!(made.lower_bound, aiter.lower_bound);
    }

    #[test]
    fn balanced_cuts_at_whole_blocks(lengths in lengths(), params in any_params(), table in table()) {
        let params = ScheduleParams { policy: Policy::Balanced(table), ..params };
        let kv_indptr = indptr(0, &lengths);
        let made = schedule(&kv_indptr, &params).unwrap();
        let is_fill = balanced(&kv_indptr, &params, &table).1;
        let block = if is_fill { i128::from(table.block_tokens) } else { 16 };
        for (_, tile, from, to, is_whole) in works_of(&made) {
            let length = i128::from(lengths[tile / params.fold]);
            prop_assert!(from % block == 0);
            prop_assert!(to == length || to % block == 0);
            prop_assert!(from < to);
            prop_assert_eq!(is_whole, from == 0 && to == length);
        }
    }

    #[test]
    fn pieces_of_a_row_do_not_know_its_neighbours(
        lengths in lengths(), others in lengths(), params in any_params(), num_cus in 1..400_usize,
        tables in [table(), table()], g in piece_tokens(), at in any::<prop::sample::Index>(),
    ) {
        prop_assume!(!lengths.is_empty() && g >= 16);
        let row = at.index(lengths.len());
        let pieces = |lengths: &[i32], row: usize, params: &ScheduleParams| -> Vec<(i128, i128, bool)> {
            let made = schedule(&indptr(0, lengths), params).unwrap();
            let works = works_of(&made).into_iter().filter(|work| work.1 == row * params.fold);
            works.map(|work| (work.2, work.3, work.4)).collect()
        };
        let [table, other_table] = tables;
        let params = ScheduleParams { policy: Policy::Invariant { table, piece_tokens: g }, ..params };
        let expected = pieces(&lengths, row, &params);
        let joined = [&others[..], &lengths[row..=row], &others[..]].concat();
        let other = Policy::Invariant { table: other_table, piece_tokens: g };
        let elsewhere = ScheduleParams { num_cus, max_split_per_batch: 1, policy: other, ..params };
        prop_assert_eq!(pieces(&joined, others.len(), &elsewhere), expected);
    }

    #[test]
    fn writing_in_place_touches_only_what_it_says(
        lengths in lengths(), params in any_params(), table in table(), g in 16..3000_i32, spare in 0..20_usize,
    ) {
        let kv_indptr = indptr(0, &lengths);
        for policy in [Policy::Balanced(table), Policy::Invariant { table, piece_tokens: g }] {
            let params = ScheduleParams { policy, ..params };
            let made = schedule(&kv_indptr, &params).unwrap();
            let tiles = lengths.len() * params.fold;
            let topk = lengths.iter().copied().max().unwrap_or(0);
            let works = policy.max_works(tiles, params.num_cus, topk);
            let mut work_indptr = vec![-7; params.num_cus + 1];
            let mut work_info = vec![-7; works * WORK_WORDS + spare];
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
    }
}

const PARAMS: ScheduleParams = ScheduleParams {
    num_cus: 304,
    max_split_per_batch: 16,
    fold: 1,
    variant: Variant::Parallel,
    empty_rows: EmptyRows::Skip,
    policy: Policy::Aiter,
};

fn both(table: CostTable, piece_tokens: i32) -> [Policy; 2] {
    [Policy::Balanced(table), Policy::Invariant { table, piece_tokens }]
}

#[test]
fn longest_rows_and_dearest_tables_do_not_overflow() {
    let dearest = CostTable {
        block_tokens: 1,
        block: MAX_COST,
        piece: MAX_COST,
        whole: MAX_COST,
        slot: MAX_COST,
        merge: MAX_COST,
        cut: MAX_COST,
    };
    let cheapest = CostTable {
        block: 1,
        piece: 0,
        whole: 0,
        ..dearest
    };
    let rest = i32::MAX - 1 - 40_000;
    for kv_indptr in [
        vec![0, i32::MAX],
        vec![0, 1, i32::MAX],
        vec![5, 5 + rest, i32::MAX],
        indptr(i32::MAX - 3, &[1, 1, 1]),
    ] {
        for (num_cus, fold, budget) in [(1, 1, -1), (3, 128, 1), (304, 128, -1), (1 << 16, 1, i32::MAX)] {
            for table in [dearest, cheapest, CostTable::BF16_HEADS_16] {
                for policy in both(table, 1 << 20) {
                    let params = ScheduleParams {
                        num_cus,
                        fold,
                        max_split_per_batch: budget,
                        policy,
                        ..PARAMS
                    };
                    let made = schedule(&kv_indptr, &params).unwrap();
                    assert_eq!(verdict(&kv_indptr, &made), Ok(()), "{params:?}");
                    let expected = match policy {
                        Policy::Balanced(_) => balanced(&kv_indptr, &params, &table).0,
                        _ => invariant(&kv_indptr, &params, &table, 1 << 20),
                    };
                    assert_eq!(works_of(&made), expected, "{params:?}");
                }
            }
        }
    }
}

/// Some rows of about one length on a few slots, which aiter's walk often leaves whole.
fn even_lengths() -> impl Strategy<Value = (Vec<i32>, usize)> {
    (1..2049_i32, 0..40_i32, 1..60_usize, 1..40_usize).prop_flat_map(|(length, off, rows, num_cus)| {
        let lengths = prop::collection::vec(0..=off, rows);
        lengths.prop_map(move |off| {
            (
                off.into_iter().map(|off| (length - off).max(1)).collect(),
                num_cus,
            )
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 1 << 20, ..config(400) })]

    #[test]
    fn the_fill_has_to_gain_what_a_cut_costs((lengths, num_cus) in even_lengths(), table in table()) {
        let kv_indptr = indptr(0, &lengths);
        let at = |cut| {
            let table = CostTable { cut, ..table };
            let params = ScheduleParams { num_cus, policy: Policy::Balanced(table), ..PARAMS };
            let made = schedule(&kv_indptr, &params).unwrap();
            let expected = choice(&kv_indptr, &params, &table).unwrap();
            (works_of(&made), expected)
        };
        let (_, free) = at(0);
        // The fill is shorter, the walk cuts nothing, and a cut can cost as much as the difference.
        prop_assume!(free.whole.is_none());
        let gain = u32::try_from(free.f - free.x).ok().filter(|&gain| gain < MAX_COST);
        prop_assume!(!free.is_cut && gain.is_some());
        let gain = gain.unwrap();
        for cut in [0, gain / 2, gain] {
            prop_assert_eq!(&at(cut).0, &free.fill, "{} of {}", cut, gain);
        }
        for cut in [gain + 1, MAX_COST] {
            prop_assert_eq!(&at(cut).0, &free.walk, "{} of {}", cut, gain);
        }
    }

    #[test]
    fn where_the_walk_cuts_what_a_cut_costs_does_not_matter(
        lengths in lengths(), params in any_params(), table in table(), cut in cost(),
    ) {
        let kv_indptr = indptr(0, &lengths);
        let made = |cut| {
            let table = CostTable { cut, ..table };
            let params = ScheduleParams { policy: Policy::Balanced(table), ..params };
            (works_of(&schedule(&kv_indptr, &params).unwrap()), choice(&kv_indptr, &params, &table))
        };
        let (free, expected) = made(0);
        prop_assume!(expected.is_some_and(|expected| expected.is_cut && expected.whole.is_none()));
        prop_assert_eq!(made(cut).0, free);
    }

    #[test]
    fn a_dear_cut_is_made_only_where_the_walk_makes_one_and_rows_differ(
        lengths in prop::collection::vec(1..2049_i32, 1..60), params in any_params(), table in prop::sample::select(&KERNELS),
    ) {
        let kv_indptr = indptr(0, &lengths);
        let walk = works_of(&schedule(&kv_indptr, &ScheduleParams { empty_rows: EmptyRows::Skip, ..params }).unwrap());
        let table = CostTable { cut: MAX_COST, ..table };
        let made = schedule(&kv_indptr, &ScheduleParams { policy: Policy::Balanced(table), ..params }).unwrap();
        let made = works_of(&made);
        let blocks = |length: &i32| length.unsigned_abs().div_ceil(table.block_tokens);
        let is_alike = lengths.iter().all(|length| blocks(length) == blocks(&lengths[0]));
        prop_assert!(is_alike || is_cut(&walk) || made == walk);
        prop_assert!(!is_alike || !is_cut(&made));
    }
}

#[test]
fn full_rows_are_cut_only_for_more_than_a_cut_costs() {
    // 256 rows of 2048 tokens on 132 slots, as measured on an H200 with 16 heads: the walk leaves all of them whole.
    let table = CostTable {
        block_tokens: 64,
        block: 2606,
        piece: 1650,
        whole: 1503,
        slot: 4848,
        merge: 243,
        cut: 0,
    };
    let kv_indptr = indptr(0, &[2048; 256]);
    let cut_tiles = |cut| {
        let policy = Policy::Balanced(CostTable { cut, ..table });
        let made = schedule(
            &kv_indptr,
            &ScheduleParams {
                num_cus: 132,
                policy,
                ..PARAMS
            },
        )
        .unwrap();
        made.reduce_indptr
            .windows(2)
            .filter(|bounds| bounds[0] < bounds[1])
            .count()
    };
    assert!(cut_tiles(0) > 100);
    assert_eq!(cut_tiles(8000), 0);
}

#[test]
fn more_pieces_than_can_be_numbered_are_refused() {
    let policy = Policy::Invariant {
        table: CostTable::AITER,
        piece_tokens: 1,
    };
    let message = schedule(&[0, i32::MAX], &ScheduleParams { policy, ..PARAMS })
        .unwrap_err()
        .to_string();
    assert!(message.contains("works of the schedule"), "{message}");
}

#[test]
fn no_rows_and_empty_rows_make_no_work() {
    for policy in both(CostTable::BF16_HEADS_16, 256) {
        for kv_indptr in [&[0][..], &[7], &[7, 7, 7]] {
            for budget in [-1, 1, 16] {
                let params = ScheduleParams {
                    max_split_per_batch: budget,
                    empty_rows: EmptyRows::Aiter,
                    policy,
                    ..PARAMS
                };
                let made = schedule(kv_indptr, &params).unwrap();
                assert_eq!(made.counts.num_works, 0);
                assert_eq!(made.work_indptr, [0; 305]);
                assert_eq!(verdict(kv_indptr, &made), Ok(()));
            }
        }
    }
}

#[test]
fn one_compute_unit_takes_every_row_whole() {
    let params = ScheduleParams {
        num_cus: 1,
        policy: Policy::Balanced(CostTable::BF16_HEADS_16),
        ..PARAMS
    };
    let made = schedule(&indptr(0, &[2048, 1, 700, 2048]), &params).unwrap();
    assert_eq!(made.counts.num_works, 4);
    assert_eq!(made.counts.num_partials, 0);
}

#[test]
fn gains_over_aiter_are_those_of_the_kernels_table() {
    // aiter's longest slot and a plain greedy fill's, in instructions, budget 16; full rows of 2048 tokens.
    let expected = [
        (CostTable::BF16_HEADS_16, 304, 1, 3968, 3656),
        (CostTable::BF16_HEADS_16, 304, 16, 3968, 3656),
        (CostTable::BF16_HEADS_16, 304, 64, 10_820, 9886),
        (CostTable::BF16_HEADS_16, 304, 256, 39_167, 35_740),
        (CostTable::GFX942_FP8_HEADS_16, 304, 1, 1954, 1610),
    ];
    for (table, num_cus, rows, aiter, greedy) in expected {
        let kv_indptr = indptr(0, &vec![2048; rows]);
        let params = ScheduleParams { num_cus, ..PARAMS };
        let plain = schedule(&kv_indptr, &params).unwrap().quality(&table).finish_time;
        assert!(plain.abs_diff(10 * aiter) <= 5, "{rows} rows: {plain}");
        let params = ScheduleParams {
            policy: Policy::Balanced(table),
            ..params
        };
        let made = schedule(&kv_indptr, &params).unwrap();
        let longest = finish_time(&made.work_indptr, &made.work_info, &table);
        assert!(longest <= 10 * greedy + 5, "{rows} rows: {longest} > {greedy}0");
    }
}

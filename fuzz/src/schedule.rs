//! Schedules: any `kv_indptr` and parameters, against what must hold for every schedule.

use mlaplan::PlanError;
use mlaplan::schedule::quality::{finish_time, lower_bound};
use mlaplan::schedule::{
    CostTable, EmptyRows, MAX_FOLD, MAX_NUM_CUS, Policy, Schedule, ScheduleArrays, ScheduleParams, Variant,
    WORK_WORDS, check, first_unsafe_work, is_safe, schedule, write_schedule,
};
use mlaplan::split::max_split_per_batch;

use super::input::Input;
use super::policies;

/// Works that the arrays may hold: a few megabytes.
const MOST_WORKS: usize = 1 << 14;

#[derive(Debug)]
struct Case {
    kv_indptr: Vec<i32>,
    params: ScheduleParams,
}

/// Runs one input.
///
/// # Panics
///
/// If a result differs from the definition, or a schedule breaks one of its promises.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let case = decode(&mut input);
    check_budget(&mut input);
    let fault = fault(&case);
    let tiles = case
        .kv_indptr
        .len()
        .saturating_sub(1)
        .saturating_mul(case.params.fold);
    if fault.is_none() && (tiles + case.params.num_cus).max(most_works(&case)) > MOST_WORKS {
        return;
    }
    let made = schedule(&case.kv_indptr, &case.params);
    assert_eq!(made.as_ref().err().map(argument), fault, "{case:?}");
    write_in_place(&mut input, &case, made.as_ref().ok());
    let Ok(made) = made else { return };
    assert_eq!(verdict(&case, &made), Ok(()), "{case:?}");
    covers_every_row_once(&case, &made);
    unsafe_where_a_work_is_hidden(&case, &made);
    skips_empty_rows(&case, &made);
    keeps_to_its_policy(&case, &made);
    finishes_not_before_the_bound(&mut input, &made);
    a_changed_work_is_found(&mut input, &case, &made);
}

fn decode(input: &mut Input<'_>) -> Case {
    let num_cus = match input.byte() {
        small @ 0..=99 => usize::from(small % 24),
        100..=219 => input.pick(&[1, 80, 228, 256, 304]),
        _ => input.any_usize(),
    };
    let max_split_per_batch = match input.byte() % 4 {
        0 => -1,
        1 | 2 => i32::from(input.byte() % 20),
        _ => input.number(),
    };
    let fold = match input.byte() {
        small @ 0..=239 => usize::from(small % 10),
        240..=247 => usize::from(input.byte()),
        _ => input.any_usize(),
    };
    let choice = input.byte();
    let variant = [Variant::Parallel, Variant::Serial][usize::from(choice % 2)];
    let policy = policies::policy(input, choice / 2);
    let empty_rows = input.pick(&[EmptyRows::Aiter, EmptyRows::Skip]);
    let orderly = !input.one_in(8);
    let entries = input.below(64);
    let mut end = if input.flag() { input.number() } else { 0 };
    if orderly {
        end = end.max(0);
    }
    let mut kv_indptr = Vec::new();
    for _ in 0..entries {
        kv_indptr.push(end);
        end = if orderly {
            end.saturating_add(row_length(input))
        } else {
            input.number()
        };
    }
    Case {
        kv_indptr,
        params: ScheduleParams {
            num_cus,
            max_split_per_batch,
            fold,
            variant,
            empty_rows,
            policy,
        },
    }
}

fn row_length(input: &mut Input<'_>) -> i32 {
    match input.byte() % 8 {
        0 => 0,
        1 | 2 => 2048,
        3 => i32::from(input.byte() % 128) * 16,
        4 => i32::from(input.byte() % 128) * 16 + 1,
        5 => i32::from(input.byte()),
        6 => i32::from(input.byte()) << 8 | i32::from(input.byte()),
        _ => input.number().max(0),
    }
}

/// The first argument that breaks a rule.
fn fault(case: &Case) -> Option<&'static str> {
    let (params, indptr) = (&case.params, &case.kv_indptr);
    let budget = params.max_split_per_batch;
    if !(1..=MAX_NUM_CUS).contains(&params.num_cus) {
        Some("num_cus")
    } else if !(1..=MAX_FOLD).contains(&params.fold) {
        Some("fold")
    } else if budget < -1 || budget == 0 {
        Some("max_split_per_batch")
    } else if let Some(argument) = policies::fault(&params.policy) {
        Some(argument)
    } else if indptr.is_empty() || indptr[0] < 0 || !indptr.is_sorted() {
        Some("kv_indptr")
    } else {
        None
    }
}

/// Works that the arrays must have room for.
fn most_works(case: &Case) -> usize {
    let params = &case.params;
    let rows = case.kv_indptr.len().saturating_sub(1);
    match params.policy {
        Policy::Invariant { piece_tokens, .. } if fault(case).is_none() => {
            let pieces = |row: &[i32]| {
                (row[1] - row[0])
                    .unsigned_abs()
                    .div_ceil(piece_tokens.unsigned_abs())
            };
            let pieces: usize = case
                .kv_indptr
                .windows(2)
                .map(|row| usize::try_from(pieces(row)).unwrap())
                .sum();
            pieces.saturating_mul(params.fold)
        }
        _ => rows
            .saturating_mul(params.fold)
            .saturating_add(params.num_cus)
            .saturating_sub(1),
    }
}

fn argument(error: &PlanError) -> &'static str {
    assert!(!error.to_string().is_empty());
    match *error {
        PlanError::Entry { argument, .. }
        | PlanError::Length { argument, .. }
        | PlanError::Number { argument, .. } => argument,
        PlanError::Capacity { what, .. } => what,
        _ => panic!("unexpected {error}"),
    }
}

fn check_budget(input: &mut Input<'_>) {
    let length = input.pick(&[0, 1, 127, 128, 2047, 2048, i64::MAX, -1]);
    let (topk, num_cus, tokens) = (input.number(), input.below(256) * 9, input.number());
    let made = max_split_per_batch(length, topk, num_cus, tokens);
    let is_valid = length >= 0 && topk >= 1 && num_cus >= 1 && tokens >= 1;
    assert_eq!(made.is_ok(), is_valid);
    let Ok(budget) = made else { return };
    let splits = length.min(topk.into()) / i64::from(tokens);
    let mut power = 1_i64;
    while power < splits {
        power *= 2;
    }
    assert_eq!(i64::from(budget), power.min(i64::try_from(num_cus).unwrap()));
}

fn verdict(case: &Case, made: &Schedule) -> Result<(), PlanError> {
    check(
        &case.kv_indptr,
        &case.params,
        &made.work_indptr,
        &made.work_info,
        &made.reduce_indptr,
    )
}

fn works(made: &Schedule) -> &[[i32; WORK_WORDS]] {
    let (works, rest) = made.work_info.as_chunks::<WORK_WORDS>();
    assert!(rest.is_empty());
    works
}

/// Every tile's pieces, put in order, are its row from end to end; partial locations are numbered without a gap.
fn covers_every_row_once(case: &Case, made: &Schedule) {
    let (works, indptr) = (works(made), &case.kv_indptr);
    let tiles = (indptr.len() - 1) * case.params.fold;
    let counts = made.counts;
    assert_eq!(made.work_indptr.len(), case.params.num_cus + 1);
    assert!(made.work_indptr.is_sorted() && made.work_indptr[0] == 0);
    assert_eq!(
        usize::try_from(made.work_indptr[case.params.num_cus]).unwrap(),
        works.len()
    );
    assert_eq!(works.len(), counts.num_works);
    assert!(counts.num_slots <= case.params.num_cus);
    match case.params.policy {
        Policy::Invariant { .. } => assert_eq!(works.len(), most_works(case)),
        _ => assert!(works.len() < (tiles + counts.num_slots).max(1)),
    }
    assert_eq!(made.reduce_indptr.len(), tiles + 1);
    let mut pieces = vec![Vec::new(); tiles];
    for (at, work) in works.iter().enumerate() {
        let tile = usize::try_from(work[0]).unwrap();
        let end = indptr[tile / case.params.fold + 1] - indptr[0];
        assert_eq!([work[2], work[3], work[7]], [work[0], work[0] + 1, 0]);
        assert_eq!(work[6], end - work[5]);
        pieces[tile].push((work[4], work[5], work[1], at));
    }
    let mut location = 0;
    for (tile, pieces) in pieces.iter_mut().enumerate() {
        pieces.sort_unstable();
        let row = tile / case.params.fold;
        let (start, end) = (indptr[row] - indptr[0], indptr[row + 1] - indptr[0]);
        if start == end {
            let most = usize::from(gives_empty_rows_works(case));
            assert!(pieces.len() <= most, "tile {tile} of {case:?}");
        } else {
            assert!(!pieces.is_empty(), "tile {tile} of {case:?}");
        }
        let mut covered = start;
        for &(from, to, partial, _) in pieces.iter() {
            assert_eq!(from, covered, "tile {tile} of {case:?}");
            assert!(to > from || start == end, "tile {tile} of {case:?}");
            covered = to;
            assert_eq!(partial, if pieces.len() > 1 { location } else { -1 });
            location += i32::from(pieces.len() > 1);
        }
        assert!(covered == end || pieces.is_empty(), "tile {tile} of {case:?}");
        assert_eq!(made.reduce_indptr[tile + 1], location);
    }
    assert_eq!(usize::try_from(location).unwrap(), counts.num_partials);
}

fn gives_empty_rows_works(case: &Case) -> bool {
    case.params.policy == Policy::Aiter && case.params.empty_rows == EmptyRows::Aiter
}

/// What each policy promises beside covering every row.
fn keeps_to_its_policy(case: &Case, made: &Schedule) {
    match case.params.policy {
        Policy::Aiter => {}
        Policy::Balanced(table) => {
            let aiter = ScheduleParams {
                policy: Policy::Aiter,
                empty_rows: EmptyRows::Skip,
                ..case.params
            };
            let aiter = schedule(&case.kv_indptr, &aiter).unwrap();
            let longest = [made, &aiter].map(|made| made.quality(&table).finish_time);
            assert!(longest[0] <= longest[1], "{longest:?} {case:?}");
            let merges = [made, &aiter].map(|made| made.counts.num_partials > 0);
            let cut = merges.map(|merges| if merges { u64::from(table.cut) } else { 0 });
            assert!(
                longest[0] + cut[0] <= longest[1] + cut[1],
                "{longest:?} {cut:?} {case:?}"
            );
        }
        Policy::Invariant { piece_tokens, .. } => {
            assert_eq!(made.counts.num_slots, case.params.num_cus);
            for work in works(made) {
                let tile = usize::try_from(work[0]).unwrap() / case.params.fold;
                let start = case.kv_indptr[tile] - case.kv_indptr[0];
                assert_eq!((work[4] - start) % piece_tokens, 0, "{case:?}");
                assert!(work[5] - work[4] == piece_tokens || work[6] == 0, "{case:?}");
                assert!(work[5] - work[4] <= piece_tokens, "{case:?}");
            }
        }
    }
}

/// Runs every slot as the kernels do: an empty work ends it, so what comes behind one is never reached.
fn unsafe_where_a_work_is_hidden(case: &Case, made: &Schedule) {
    let works = works(made);
    let mut hiding = None;
    for (slot, bounds) in made.work_indptr.windows(2).enumerate() {
        let [begin, end] = [bounds[0], bounds[1]].map(|at| usize::try_from(at).unwrap());
        let empty = (begin..end).find(|&at| works[at][4] == works[at][5]);
        if let Some(at) = empty.filter(|&at| at + 1 < end) {
            hiding = hiding.or(Some((slot, at)));
        }
    }
    assert_eq!(first_unsafe_work(&made.work_indptr, &made.work_info), hiding);
    let safe = is_safe(&made.work_indptr, &made.work_info);
    assert_eq!(safe, hiding.is_none());
    if !gives_empty_rows_works(case) {
        assert!(safe && works.iter().all(|work| work[4] < work[5]), "{case:?}");
    }
}

/// With `Skip` a schedule is that of the rows that are not empty, renamed; without empty rows nothing else matters.
fn skips_empty_rows(case: &Case, made: &Schedule) {
    let fold = case.params.fold;
    let rows = case.kv_indptr.windows(2);
    let live: Vec<usize> = rows
        .enumerate()
        .filter(|(_, row)| row[0] < row[1])
        .map(|(row, _)| row)
        .collect();
    let all_live = live.len() + 1 == case.kv_indptr.len();
    if gives_empty_rows_works(case) && !all_live {
        return;
    }
    let mut dense = vec![0];
    dense.extend(
        live.iter()
            .map(|&row| case.kv_indptr[row + 1] - case.kv_indptr[0]),
    );
    for variant in [Variant::Parallel, Variant::Serial] {
        let params = ScheduleParams {
            variant,
            empty_rows: EmptyRows::Aiter,
            ..case.params
        };
        let other = schedule(&dense, &params).unwrap();
        assert_eq!(other.work_indptr, made.work_indptr, "{case:?}");
        let renamed = works(&other).iter().map(|work| {
            let tile = usize::try_from(work[0]).unwrap();
            let tile = i32::try_from(live[tile / fold] * fold + tile % fold).unwrap();
            [tile, work[1], tile, tile + 1, work[4], work[5], work[6], 0]
        });
        assert!(renamed.eq(works(made).iter().copied()), "{case:?}");
    }
}

fn finishes_not_before_the_bound(input: &mut Input<'_>, made: &Schedule) {
    let mut tables = vec![
        CostTable::AITER,
        CostTable::BF16_HEADS_16,
        CostTable::GFX942_FP8_HEADS_64,
        CostTable::GFX950_BF16_HEADS_64,
    ];
    let is_small = input.flag();
    let mut cost = || {
        if is_small {
            u32::from(input.byte())
        } else {
            input.any_u32()
        }
    };
    tables.push(CostTable {
        block_tokens: cost(),
        block: cost(),
        piece: cost(),
        whole: cost(),
        slot: cost(),
        merge: cost(),
        cut: 0, // in no longest slot and in no bound
    });
    for table in &tables {
        let quality = made.quality(table);
        assert!(
            quality.finish_time >= quality.lower_bound,
            "{table:?} {quality:?} {made:?}"
        );
        assert!(quality.ratio() >= 1.0);
    }
}

/// One changed word in the works of a schedule that was right is a violation.
fn a_changed_work_is_found(input: &mut Input<'_>, case: &Case, made: &Schedule) {
    if made.work_info.is_empty() {
        return;
    }
    let mut wrong = made.clone();
    let at = input.any_usize() % wrong.work_info.len();
    let value = input.number();
    let changed = std::mem::replace(&mut wrong.work_info[at], value) != value;
    if at % WORK_WORDS != 7 {
        assert_eq!(
            verdict(case, &wrong).is_err(),
            changed,
            "word {at} is {value} in {case:?}"
        );
    }
    // Nothing that measures a schedule may panic on one that is wrong.
    let slot = input.any_usize() % wrong.work_indptr.len();
    wrong.work_indptr[slot] = input.number();
    let _ = verdict(case, &wrong);
    let _ = first_unsafe_work(&wrong.work_indptr, &wrong.work_info);
    let _ = finish_time(&wrong.work_indptr, &wrong.work_info, &CostTable::AITER);
    let _ = lower_bound(&wrong.work_info, case.params.fold, slot, &CostTable::AITER);
}

/// Arrays of any length: refused and left alone where one does not fit, else filled as `schedule` says.
fn write_in_place(input: &mut Input<'_>, case: &Case, made: Option<&Schedule>) {
    const UNTOUCHED: i32 = -77;
    let params = &case.params;
    let tiles = case.kv_indptr.len().saturating_sub(1).saturating_mul(params.fold);
    let mut size = |wanted: usize| match input.byte() {
        few @ 0..=15 => usize::from(few),
        16..=31 => wanted.saturating_sub(1),
        32..=63 => wanted.saturating_add(3),
        _ => wanted,
    };
    let wanted = [
        params.num_cus.saturating_add(1),
        most_works(case).saturating_mul(WORK_WORDS),
        tiles.saturating_add(1),
    ];
    let sizes = wanted.map(|wanted| size(wanted).min(MOST_WORKS * WORK_WORDS));
    let mut arrays = sizes.map(|len| vec![UNTOUCHED; len]);
    let [work_indptr, work_info, reduce_indptr] = &mut arrays;
    let mut out = ScheduleArrays {
        work_indptr,
        work_info,
        reduce_indptr,
    };
    let written = write_schedule(&case.kv_indptr, params, &mut out);
    let fits = sizes[0] == wanted[0] && sizes[1] >= wanted[1] && sizes[2] >= wanted[2];
    let _ = check(&case.kv_indptr, params, &arrays[0], &arrays[1], &arrays[2]);
    let Some(made) = made.filter(|_| fits) else {
        assert!(written.is_err(), "{sizes:?} for {wanted:?}");
        assert!(arrays.iter().flatten().all(|&entry| entry == UNTOUCHED));
        return;
    };
    assert_eq!(written, Ok(made.counts));
    assert_eq!(arrays[0], made.work_indptr);
    let (live, behind) = arrays[1].split_at(made.work_info.len());
    assert_eq!(live, made.work_info);
    assert!(behind.iter().all(|&entry| entry == UNTOUCHED));
    let total = made.reduce_indptr[tiles];
    let (live, behind) = arrays[2].split_at(tiles + 1);
    assert_eq!(live, made.reduce_indptr);
    assert!(behind.iter().all(|&entry| entry == total));
}

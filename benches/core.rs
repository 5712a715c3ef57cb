//! What the core costs by number of rows: rows, the schedule, what is said about a schedule, and the whole step.
//!
//! `uniform` rows are all alike, `skewed` ones mostly short with a full one among every eight. `cargo bench` wants an
//! optimised build and refuses any other; `cargo test --benches` runs each case once, on whatever build it has.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use mlaplan::batch::{Batch, Lengths};
use mlaplan::fingerprint::Fingerprint;
use mlaplan::rows::{kv_indptr, request_ids, row_lengths, segment_lengths};
use mlaplan::schedule::quality::{finish_time, lower_bound};
use mlaplan::schedule::{
    CostTable, EmptyRows, Policy, Schedule, ScheduleArrays, ScheduleParams, Variant, check,
    first_unsafe_work, schedule, write_schedule,
};
use mlaplan::split::max_split_per_batch;
use mlaplan::step::{Action, ClassLayout, StepConfig, StepPlanner};
use mlaplan::support::{Arch, Dtype, Release, buffer_shapes, support};

const ROWS: [usize; 6] = [1, 8, 64, 256, 1024, 8192];
const TOPK: i32 = 2048;
const NUM_CUS: usize = 304; // MI300X
const BALANCED: Policy = Policy::Balanced(CostTable::BF16_HEADS_16);
const DECODES: i32 = 32; // two blocks of 16 tokens
const BUDGET: i32 = 16; // of the work-per-split rule for full rows

/// KV length of a one-token request, by row.
type LengthOf = fn(i32) -> i32;

const LENGTHS: [(&str, LengthOf); 2] = [
    ("uniform", |_| 1000),
    (
        "skewed",
        |row| if row % 8 == 0 { 2000 } else { 1 + row * 37 % 200 },
    ),
];

fn count(value: usize) -> i32 {
    i32::try_from(value).expect("the sizes above are small")
}

/// Boundaries of a pure decode batch.
fn boundaries(rows: usize) -> Vec<i32> {
    (0..=count(rows)).collect()
}

fn params() -> ScheduleParams {
    ScheduleParams {
        num_cus: NUM_CUS,
        max_split_per_batch: BUDGET,
        fold: 1,
        variant: Variant::Parallel,
        empty_rows: EmptyRows::Skip,
        policy: Policy::Aiter,
    }
}

/// Calls `bench` once per number of rows, with the throughput set.
fn by_rows(
    criterion: &mut Criterion,
    question: &str,
    mut bench: impl FnMut(&mut BenchmarkGroup<'_, WallTime>, usize),
) {
    let mut group = criterion.benchmark_group(question);
    for rows in ROWS {
        group.throughput(Throughput::Elements(
            rows.try_into().expect("a count fits 64 bits"),
        ));
        bench(&mut group, rows);
    }
    group.finish();
}

/// As [`by_rows`], and for each kind of lengths.
fn by_rows_and_skew(
    criterion: &mut Criterion,
    question: &str,
    mut bench: impl FnMut(&mut BenchmarkGroup<'_, WallTime>, BenchmarkId, &[i32]),
) {
    by_rows(criterion, question, |group, rows| {
        for (skew, length) in LENGTHS {
            let lengths: Vec<i32> = (0..count(rows)).map(length).collect();
            bench(group, BenchmarkId::new(skew, rows), &lengths);
        }
    });
}

fn rows(criterion: &mut Criterion) {
    by_rows(criterion, "rows", |group, rows| {
        let query_start_loc = boundaries(rows);
        let seq_lens: Vec<i32> = (0..count(rows)).map(LENGTHS[1].1).collect();
        let lengths = row_lengths(&query_start_loc, &seq_lens, TOPK, None).expect("a valid batch");
        group.bench_function(BenchmarkId::new("segment_lengths", rows), |b| {
            b.iter(|| segment_lengths(black_box(&query_start_loc)));
        });
        group.bench_function(BenchmarkId::new("request_ids", rows), |b| {
            b.iter(|| request_ids(black_box(&query_start_loc), None));
        });
        group.bench_function(BenchmarkId::new("row_lengths", rows), |b| {
            b.iter(|| row_lengths(black_box(&query_start_loc), black_box(&seq_lens), TOPK, None));
        });
        group.bench_function(BenchmarkId::new("kv_indptr", rows), |b| {
            b.iter(|| kv_indptr(black_box(&lengths)));
        });
    });
}

/// One prefill chunk, which has a single request but as many rows as tokens.
fn rows_of_one_request(criterion: &mut Criterion) {
    by_rows(criterion, "rows_of_one_request", |group, rows| {
        let query_start_loc = [0, count(rows)];
        group.bench_function(BenchmarkId::new("row_lengths", rows), |b| {
            b.iter(|| row_lengths(black_box(&query_start_loc), &[count(rows) + 100], TOPK, None));
        });
    });
}

/// Boundaries and KV lengths of batches with this many rows: decodes of three kinds, drafts, and one prompt.
fn batches(rows: usize) -> Vec<(&'static str, Vec<i32>, Vec<i32>)> {
    let decodes = |length: LengthOf| (boundaries(rows), (0..count(rows)).map(length).collect());
    let requests = count(rows.div_ceil(4));
    let drafts: Vec<i32> = (0..=requests)
        .map(|request| (4 * request).min(count(rows)))
        .collect();
    let draft_lens = (0..requests).map(|request| 4 + LENGTHS[1].1(request)).collect();
    let [(uniform, same), (skewed, mixed)] = LENGTHS;
    [
        (uniform, decodes(same)),
        (skewed, decodes(mixed)),
        ("saturated", decodes(|_| 5000)),
        ("drafts", (drafts, draft_lens)),
        ("prompt", (vec![0, count(rows)], vec![count(rows) + 3000])),
    ]
    .map(|(kind, (starts, lens))| (kind, starts, lens))
    .into()
}

/// What a step does to its arrays, beside memcpy and memcmp of as many bytes.
fn against_memory(criterion: &mut Criterion) {
    by_rows(criterion, "write_rows", |group, rows| {
        let mut written = vec![0; 2 * rows + 1];
        let source = vec![7; 2 * rows + 1];
        group.bench_function(BenchmarkId::new("memcpy", rows), |b| {
            b.iter(|| black_box(&mut written).copy_from_slice(black_box(&source)));
        });
        for (kind, starts, lens) in batches(rows) {
            let batch = Batch::new(&starts, Lengths::Exact(&lens), true, None).expect("a valid batch");
            let mut fingerprint = Fingerprint::default();
            fingerprint.take(&batch, TOPK);
            let (ids, indptr) = written.split_at_mut(rows);
            group.bench_function(BenchmarkId::new(kind, rows), |b| {
                b.iter(|| black_box(&fingerprint).write_rows(TOPK, black_box(ids), black_box(indptr)));
            });
        }
    });
    by_rows(criterion, "unchanged", |group, rows| {
        let (one, other) = (vec![7; 2 * rows + 1], vec![7; 2 * rows + 1]);
        group.bench_function(BenchmarkId::new("memcmp", rows), |b| {
            b.iter(|| black_box(&one) == black_box(&other));
        });
        for (kind, starts, lens) in batches(rows) {
            let (mut held, mut next) = (Fingerprint::default(), Fingerprint::default());
            let batch = Batch::new(&starts, Lengths::Exact(&lens), true, None).expect("a valid batch");
            held.take(&batch, TOPK);
            group.bench_function(BenchmarkId::new(kind, rows), |b| {
                b.iter(|| {
                    let lengths = Lengths::Exact(black_box(&lens));
                    let batch = Batch::new(black_box(&starts), lengths, true, None).expect("a valid batch");
                    next.take(&batch, TOPK);
                    assert!(next.same_boundaries(&held) && next.same_contexts(&held));
                });
            });
        }
    });
}

/// A schedule alone, into arrays that exist.
fn bench_schedule(criterion: &mut Criterion, question: &str, policy: Policy) {
    by_rows_and_skew(criterion, question, |group, id, lengths| {
        let indptr = kv_indptr(lengths).expect("valid lengths");
        let params = ScheduleParams { policy, ..params() };
        let mut work_indptr = vec![0; NUM_CUS + 1];
        let mut work_info = vec![0; 8 * policy.max_works(lengths.len(), NUM_CUS, TOPK)];
        let mut reduce_indptr = vec![0; lengths.len() + 1];
        group.bench_function(id, |b| {
            b.iter(|| {
                let mut arrays = ScheduleArrays {
                    work_indptr: &mut work_indptr,
                    work_info: &mut work_info,
                    reduce_indptr: &mut reduce_indptr,
                };
                write_schedule(black_box(&indptr), &params, &mut arrays)
            });
        });
    });
}

fn schedule_walk(criterion: &mut Criterion) {
    bench_schedule(criterion, "schedule_walk", Policy::Aiter);
}

fn schedule_balanced(criterion: &mut Criterion) {
    bench_schedule(criterion, "schedule_balanced", BALANCED);
}

fn schedule_invariant(criterion: &mut Criterion) {
    let policy = Policy::Invariant {
        table: CostTable::BF16_HEADS_16,
        piece_tokens: 512,
    };
    bench_schedule(criterion, "schedule_invariant", policy);
}

/// The walk and new arrays, as `mlaplan.schedule` makes them.
fn schedule_owned(criterion: &mut Criterion) {
    by_rows_and_skew(criterion, "schedule_owned", |group, id, lengths| {
        let indptr = kv_indptr(lengths).expect("valid lengths");
        group.bench_function(id, |b| b.iter(|| schedule(black_box(&indptr), &params())));
    });
}

fn schedule_questions(criterion: &mut Criterion) {
    by_rows(criterion, "schedule_questions", |group, rows| {
        let lengths: Vec<i32> = (0..count(rows)).map(LENGTHS[1].1).collect();
        let indptr = kv_indptr(&lengths).expect("valid lengths");
        let Schedule {
            counts,
            work_indptr,
            work_info,
            reduce_indptr,
            ..
        } = schedule(&indptr, &params()).expect("valid lengths");
        group.bench_function(BenchmarkId::new("first_unsafe_work", rows), |b| {
            b.iter(|| first_unsafe_work(black_box(&work_indptr), black_box(&work_info)));
        });
        group.bench_function(BenchmarkId::new("check", rows), |b| {
            b.iter(|| {
                check(
                    black_box(&indptr),
                    &params(),
                    &work_indptr,
                    black_box(&work_info),
                    &reduce_indptr,
                )
            });
        });
        group.bench_function(BenchmarkId::new("finish_time", rows), |b| {
            b.iter(|| finish_time(black_box(&work_indptr), black_box(&work_info), &CostTable::AITER));
        });
        group.bench_function(BenchmarkId::new("lower_bound", rows), |b| {
            b.iter(|| lower_bound(black_box(&lengths), 1, counts.num_slots, &CostTable::AITER));
        });
    });
}

/// A planner with one class of `rows` rows, and the staging area that its plans are written to.
fn planner(rows: usize, policy: Policy) -> (StepPlanner, Vec<i32>) {
    let sizes = [rows, rows + 1, NUM_CUS + 1, rows + 1, 8 * (rows + NUM_CUS - 1)];
    let mut offsets = [0; 5];
    let mut words = 0;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = words;
        words += usize::next_multiple_of(size, 64);
    }
    let config = StepConfig {
        max_requests: rows,
        topk: TOPK,
        num_cus: NUM_CUS,
        fold: 1,
        split_budget: None,
        min_tokens_per_split: 128,
        policy,
        classes: vec![ClassLayout { rows, offsets, words }],
    };
    (
        StepPlanner::new(config).expect("a valid configuration"),
        vec![0; words],
    )
}

/// One whole step, as the binding takes it: validate, decide, and where a copy is due write and commit.
fn step(planner: &mut StepPlanner, staging: &mut [i32], query_start_loc: &[i32], seq_lens: &[i32]) -> Action {
    let batch = Batch::new(query_start_loc, Lengths::Exact(seq_lens), true, None).expect("a valid batch");
    let decision = planner.decide(&batch, false, false).expect("the batch fits");
    if decision.action == Action::Copy {
        black_box(planner.write(staging).expect("a copy was asked for"));
        planner.commit().expect("the plan was written");
    }
    decision.action
}

/// Batches in turn; every step must take `action`.
fn bench_steps(
    group: &mut BenchmarkGroup<'_, WallTime>,
    id: BenchmarkId,
    policy: Policy,
    batches: &[Vec<i32>],
    action: Action,
) {
    let rows = batches[0].len();
    let query_start_loc = boundaries(rows);
    let (mut planner, mut staging) = planner(rows, policy);
    step(&mut planner, &mut staging, &query_start_loc, &batches[0]);
    let mut turn = 0;
    group.bench_function(id, |b| {
        b.iter(|| {
            turn = (turn + 1) % batches.len();
            let taken = step(
                &mut planner,
                &mut staging,
                black_box(&query_start_loc),
                black_box(&batches[turn]),
            );
            assert_eq!(taken, action);
        });
    });
}

/// Every request grows and none of its rows changes, since all are saturated.
fn step_unchanged(criterion: &mut Criterion) {
    by_rows(criterion, "step_unchanged", |group, rows| {
        let batches = [vec![5000; rows], vec![5001; rows]];
        bench_steps(
            group,
            BenchmarkId::new("saturated", rows),
            Policy::Aiter,
            &batches,
            Action::Nothing,
        );
    });
}

/// Every request grows and so does its row: new rows, new schedule. After so many steps the first batch is back.
fn bench_changed(criterion: &mut Criterion, question: &str, policy: Policy, steps: i32) {
    by_rows_and_skew(criterion, question, |group, id, lengths| {
        let grown = |step: i32| lengths.iter().map(|length| length + step).collect();
        let batches: Vec<Vec<i32>> = (0..steps).map(grown).collect();
        bench_steps(group, id, policy, &batches, Action::Copy);
    });
}

fn step_changed(criterion: &mut Criterion) {
    bench_changed(criterion, "step_changed", Policy::Aiter, 2);
}

fn step_changed_balanced(criterion: &mut Criterion) {
    bench_changed(criterion, "step_changed_balanced", BALANCED, 2);
}

/// Decodes as they are served: from step to step a token more.
fn step_grown(criterion: &mut Criterion) {
    bench_changed(criterion, "step_grown", Policy::Aiter, DECODES);
}

fn step_grown_balanced(criterion: &mut Criterion) {
    bench_changed(criterion, "step_grown_balanced", BALANCED, DECODES);
}

/// Asked once per configuration or batch, whatever its size.
fn rules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rules");
    group.bench_function("max_split_per_batch", |b| {
        b.iter(|| max_split_per_batch(black_box(100_000), TOPK, NUM_CUS, 128));
    });
    group.bench_function("support", |b| {
        b.iter(|| {
            support(
                Arch::Gfx942,
                black_box(128),
                Dtype::Bf16,
                Dtype::Bf16,
                Some(256),
                Release::NEWEST,
            )
        });
    });
    group.bench_function("buffer_shapes", |b| {
        b.iter(|| {
            buffer_shapes(
                black_box(1024),
                128,
                Arch::Gfx942,
                NUM_CUS,
                Dtype::Bf16,
                Dtype::Bf16,
            )
        });
    });
    group.finish();
}

fn main() {
    // Cargo passes --bench for `cargo bench` only.
    let is_timed = std::env::args().any(|argument| argument == "--bench");
    assert!(
        !(is_timed && cfg!(debug_assertions)),
        "a debug build says nothing about speed: run `cargo bench`, without a profile of your own",
    );
    // A hundred cases of microseconds each: this much time is enough for them and keeps the whole run at minutes.
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    for group in [
        rows,
        rows_of_one_request,
        against_memory,
        schedule_walk,
        schedule_balanced,
        schedule_invariant,
        schedule_owned,
        schedule_questions,
        step_unchanged,
        step_changed,
        step_changed_balanced,
        step_grown,
        step_grown_balanced,
        rules,
    ] {
        group(&mut criterion);
    }
    criterion.final_summary();
}

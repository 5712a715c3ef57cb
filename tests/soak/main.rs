//! The step planner over millions of steps of a simulated engine: every decision against the rule, every plan against
//! one from nothing, and memory that stays where it is.
//!
//! `make soak` runs the long form, which prints what it saw as a table for `docs/results`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod engine;

use std::time::Instant;

use engine::{Arrays, Engine, Habits};

use mlaplan::batch::{Batch, Lengths};
use mlaplan::rows::{kv_indptr, request_ids, row_lengths};
use mlaplan::schedule::{CostTable, EmptyRows, Policy, ScheduleParams, Variant, schedule};
use mlaplan::split::max_split_per_batch;
use mlaplan::step::{Action, ClassLayout, StepConfig, StepPlanner};

const TOPK: i32 = 2048;
const MAX_ROWS: usize = 256;
const MAX_REQUESTS: usize = 48;
/// Steps between two changes of how the engine is used.
const STRETCH: u64 = 10_000;

/// A planner's settings.
struct Settings {
    policy: Policy,
    num_cus: usize,
    fold: usize,
    split_budget: Option<i32>,
}

const SETTINGS: [Settings; 6] = [
    settings(Policy::Aiter, 304, 1, None),
    settings(Policy::Aiter, 80, 1, Some(4)),
    settings(Policy::Aiter, 256, 2, Some(-1)),
    settings(Policy::Balanced(CostTable::BF16_HEADS_16), 304, 1, None),
    settings(
        Policy::Balanced(CostTable::GFX942_FP8_HEADS_128),
        256,
        2,
        Some(-1),
    ),
    settings(
        Policy::Invariant {
            table: CostTable::BF16_HEADS_16,
            piece_tokens: 256,
        },
        304,
        1,
        None,
    ),
];

const fn settings(policy: Policy, num_cus: usize, fold: usize, split_budget: Option<i32>) -> Settings {
    Settings {
        policy,
        num_cus,
        fold,
        split_budget,
    }
}

fn layouts(settings: &Settings) -> Vec<ClassLayout> {
    let (num_cus, fold) = (settings.num_cus, settings.fold);
    (0..=8)
        .map(|power| {
            let rows = 1 << power;
            let tiles = rows * fold;
            let most_works = settings.policy.max_works(tiles, num_cus, TOPK);
            let sizes = [rows, rows + 1, num_cus + 1, tiles + 1, 8 * most_works];
            let mut offsets = [0; 5];
            let mut words = 0;
            for (offset, size) in offsets.iter_mut().zip(sizes) {
                *offset = words;
                words += size.next_multiple_of(64);
            }
            ClassLayout { rows, offsets, words }
        })
        .collect()
}

/// What a soak has seen.
#[derive(Default)]
struct Tally {
    steps: u64,
    actions: [u64; 4],
    compared: u64,
    memory: Vec<u64>,
}

struct Soak {
    config: StepConfig,
    planner: StepPlanner,
    device: Vec<i32>,
    staging: Vec<i32>,
    /// Class and fingerprint of the plan that the host may know the device to hold.
    held: Option<(usize, Vec<(i32, i32)>)>,
    tally: Tally,
}

impl Soak {
    fn new(settings: &Settings) -> Self {
        let config = StepConfig {
            max_requests: MAX_REQUESTS,
            topk: TOPK,
            num_cus: settings.num_cus,
            fold: settings.fold,
            split_budget: settings.split_budget,
            min_tokens_per_split: 128,
            policy: settings.policy,
            classes: layouts(settings),
        };
        let words = config.classes.last().unwrap().words;
        Self {
            planner: StepPlanner::new(config.clone()).unwrap(),
            config,
            device: vec![-5; words],
            staging: vec![-6; words],
            held: None,
            tally: Tally::default(),
        }
    }

    fn step(&mut self, arrays: &Arrays, habits: Habits) {
        let lengths = match habits.kind {
            0 | 1 => Lengths::Exact(&arrays.seq_lens),
            2 => Lengths::UpperBound {
                bound: &arrays.bounds,
                max_rejects: habits.drafts,
            },
            _ => Lengths::Unknown,
        };
        let rows = *arrays.query_start_loc.last().unwrap();
        let batch = Batch::new(&arrays.query_start_loc, lengths, true, None).unwrap();
        let class = usize::try_from(rows.max(1)).unwrap().next_power_of_two().ilog2() as usize;
        let deferred = habits.deferred && arrays.pure;
        let decision = if deferred {
            self.planner.defer(&batch).unwrap()
        } else {
            self.planner.decide(&batch, true, false).unwrap()
        };
        let fingerprint = fingerprint(arrays);
        let is_held = self.held == Some((class, fingerprint.clone()));
        let wanted = match (deferred, is_known(arrays, habits), is_held) {
            (true, ..) => Action::Deferred,
            (_, true, true) => Action::Nothing,
            (_, true, false) => Action::Copy,
            _ => Action::Launch,
        };
        assert_eq!(
            decision.action, wanted,
            "step {}: {:?}",
            self.tally.steps, arrays.seq_lens
        );
        assert_eq!(decision.class, class);
        let layout = self.config.classes[class];
        let expected = self.made_anew(arrays, &layout);
        match wanted {
            Action::Nothing => {}
            Action::Copy => {
                let written = self.planner.write(&mut self.staging).unwrap();
                self.device[..written.words].copy_from_slice(&self.staging[..written.words]);
                self.planner.commit().unwrap();
                self.held = Some((class, fingerprint));
            }
            Action::Launch | Action::Deferred => {
                if wanted == Action::Deferred {
                    self.planner.made_on_device();
                }
                self.launch(&expected, &layout);
                self.held = None;
            }
        }
        let same = self.content(&layout) == expected;
        assert!(
            same,
            "step {}, {wanted:?}, {:?}: {arrays:?}",
            self.tally.steps, self.config.policy
        );
        self.tally.compared += 1;
        self.tally.steps += 1;
        self.tally.actions[wanted as usize] += 1;
    }

    /// Sizes of the live parts of a class's arrays, for so many works.
    fn sizes(&self, layout: &ClassLayout, works: usize) -> [usize; 5] {
        [
            layout.rows,
            layout.rows + 1,
            self.config.num_cus + 1,
            layout.rows * self.config.fold + 1,
            8 * works,
        ]
    }

    fn content(&self, layout: &ClassLayout) -> Vec<i32> {
        let works = usize::try_from(self.device[layout.offsets[2] + self.config.num_cus]).unwrap();
        let arrays = layout.offsets.into_iter().zip(self.sizes(layout, works));
        arrays
            .flat_map(|(offset, size)| self.device[offset..offset + size].iter().copied())
            .collect()
    }

    /// Writes a plan as the plan kernel does.
    fn launch(&mut self, plan: &[i32], layout: &ClassLayout) {
        let fixed: usize = self.sizes(layout, 0).iter().sum();
        let mut rest = plan;
        for (offset, size) in layout
            .offsets
            .into_iter()
            .zip(self.sizes(layout, (plan.len() - fixed) / 8))
        {
            let (array, behind) = rest.split_at(size);
            self.device[offset..offset + size].copy_from_slice(array);
            rest = behind;
        }
    }

    /// The split budget that the policy chooses for a longest row.
    fn budget(&self, longest: i32) -> i32 {
        let config = &self.config;
        match config.policy {
            Policy::Aiter => {
                max_split_per_batch(longest.into(), TOPK, config.num_cus, config.min_tokens_per_split)
                    .unwrap()
            }
            Policy::Balanced(table) => cheapest_pieces(longest, &table, config.num_cus),
            Policy::Invariant { .. } => -1,
        }
    }

    /// The plan made by functions that know nothing of steps.
    fn made_anew(&self, arrays: &Arrays, layout: &ClassLayout) -> Vec<i32> {
        let config = &self.config;
        let lengths = row_lengths(&arrays.query_start_loc, &arrays.seq_lens, TOPK, None).unwrap();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let budget = config.split_budget.unwrap_or_else(|| self.budget(longest));
        let mut indptr = kv_indptr(&lengths).unwrap();
        let params = ScheduleParams {
            num_cus: config.num_cus,
            max_split_per_batch: budget,
            fold: config.fold,
            variant: Variant::Parallel,
            empty_rows: EmptyRows::Skip,
            policy: config.policy,
        };
        let plan = schedule(&indptr, &params).unwrap();
        let mut content = request_ids(&arrays.query_start_loc, Some(layout.rows)).unwrap();
        indptr.resize(layout.rows + 1, *indptr.last().unwrap());
        content.extend(indptr);
        content.extend(&plan.work_indptr);
        let mut reduce = plan.reduce_indptr;
        reduce.resize(layout.rows * config.fold + 1, *reduce.last().unwrap());
        content.extend(reduce);
        content.extend(&plan.work_info);
        content
    }
}

/// The cheapest number of pieces for a longest row, every number tried: section 6 of the design.
fn cheapest_pieces(longest: i32, table: &CostTable, num_cus: usize) -> i32 {
    let blocks = table.blocks(longest.unsigned_abs());
    let [block, piece, whole] = [table.block, table.piece, table.whole].map(u64::from);
    let [merge, cut] = [table.merge, table.cut].map(u64::from);
    let most = blocks.min(u64::try_from(num_cus).unwrap()).max(1);
    let cost = |pieces: &u64| match *pieces {
        1 => whole + blocks * block,
        pieces => piece + blocks.div_ceil(pieces) * block + pieces * merge + cut,
    };
    i32::try_from((1..=most).min_by_key(cost).unwrap()).unwrap()
}

/// Query tokens and clamped context of each request: all that a plan depends on.
fn fingerprint(arrays: &Arrays) -> Vec<(i32, i32)> {
    let pairs = arrays.query_start_loc.windows(2).zip(&arrays.seq_lens);
    pairs
        .map(|(pair, length)| {
            let query_len = pair[1] - pair[0];
            (query_len, (length - query_len).min(TOPK - 1))
        })
        .collect()
}

/// Whether the host can know every row.
fn is_known(arrays: &Arrays, habits: Habits) -> bool {
    match habits.kind {
        0 | 1 => true,
        2 => {
            habits.drafts == 0
                || arrays
                    .query_start_loc
                    .windows(2)
                    .zip(&arrays.bounds)
                    .all(|(pair, bound)| bound - habits.drafts - (pair[1] - pair[0]) + 1 >= TOPK)
        }
        _ => arrays.seq_lens.is_empty(),
    }
}

/// Resident memory of the process in bytes, for pages of 4 KiB; 0 where there is no `/proc`.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm
        .split_whitespace()
        .nth(1)
        .map_or(0, |pages| pages.parse::<u64>().unwrap() * 4096)
}

fn soak(settings: &Settings, seed: u64, steps: u64) -> Tally {
    let mut engine = Engine::new(seed);
    let mut soak = Soak::new(settings);
    for step in 0..steps {
        if step % STRETCH.min(steps / 10) == 0 {
            engine.change_habits();
            soak.tally.memory.push(resident());
        }
        engine.schedule();
        soak.step(&engine.arrays, engine.habits);
        engine.apply();
    }
    soak.tally.memory.push(resident());
    soak.tally
}

#[test]
fn thousands_of_steps_are_decided_and_planned_right() {
    for (seed, settings) in (0..).zip(&SETTINGS) {
        assert_eq!(soak(settings, seed, 3000).compared, 3000);
    }
    // Every action is met somewhere among many short engines.
    let mut actions = [0; 4];
    for seed in 100..110 {
        let tally = soak(&SETTINGS[0], seed, 1000);
        for (sum, more) in actions.iter_mut().zip(tally.actions) {
            *sum += more;
        }
    }
    assert!(actions.iter().all(|&times| times > 0), "{actions:?}");
}

#[test]
#[ignore = "minutes: `make soak` runs it"]
#[expect(clippy::print_stdout, reason = "the table is what it is run for")]
fn ten_million_steps_are_decided_and_planned_right() {
    println!(
        "| policy | CUs, fold, budget | steps | plans compared | nothing | copy | launch | deferred | resident KiB | minutes |"
    );
    println!("|{}", " --- |".repeat(10));
    for (seed, settings) in (0..).zip(&SETTINGS) {
        let begin = Instant::now();
        let tally = soak(settings, seed, 1_666_667);
        // Behind the first tenth every size has been met.
        let settled = &tally.memory[tally.memory.len() / 10..];
        let (least, most) = (settled.iter().min().unwrap(), settled.iter().max().unwrap());
        let [nothing, copy, launch, deferred] = tally.actions;
        let name = match settings.policy {
            Policy::Aiter => "aiter",
            Policy::Balanced(_) => "balanced",
            Policy::Invariant { .. } => "invariant",
        };
        let budget = settings
            .split_budget
            .map_or("rule".into(), |budget| budget.to_string());
        println!(
            "| {name} | {}, {}, {budget} | {} | {} | {nothing} | {copy} | {launch} | {deferred} | {} to {} | {:.1} |",
            settings.num_cus,
            settings.fold,
            tally.steps,
            tally.compared,
            least / 1024,
            most / 1024,
            begin.elapsed().as_secs_f64() / 60.0,
        );
        assert!(most - least < 1 << 20, "memory grew from {least} to {most} bytes");
    }
}

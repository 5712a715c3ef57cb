//! Histories of a step planner, against plans from nothing and a model of what the device holds.

use mlaplan::PlanError;
use mlaplan::batch::{Batch, Lengths};
use mlaplan::rows::{kv_indptr, request_ids, row_lengths};
use mlaplan::schedule::{CostTable, EmptyRows, Policy, ScheduleParams, Variant, schedule};
use mlaplan::split::{max_split_per_batch, split_budget};
use mlaplan::step::{Action, ClassLayout, Decision, StepConfig, StepPlanner};

use super::input::Input;

const MAX_REQUESTS: usize = 10;
const MOST_STEPS: usize = 64;

/// What the device held last: a class, and its arrays from nothing.
type Held = Option<(usize, Vec<i32>)>;

struct History {
    config: StepConfig,
    planner: StepPlanner,
    device: Vec<i32>,
    staging: Vec<i32>,
    /// What the planner may believe, None for nothing.
    held: Held,
    last: Truth,
}

/// The device's arrays of one step.
#[derive(Debug, Clone, Default)]
struct Truth {
    query_start_loc: Vec<i32>,
    seq_lens: Vec<i32>,
}

/// What the host is told of one step.
#[derive(Debug)]
struct Told {
    query_start_loc: Vec<i32>,
    lengths: Vec<i32>,
    /// 0 for exact lengths, 1 for bounds, 2 for none.
    kind: u8,
    max_rejects: i32,
    boundaries_exact: bool,
    padded: i64,
}

impl Told {
    fn batch(&self) -> Batch<'_> {
        let lengths = match self.kind {
            0 => Lengths::Exact(&self.lengths),
            1 => Lengths::UpperBound {
                bound: &self.lengths,
                max_rejects: self.max_rejects,
            },
            _ => Lengths::Unknown,
        };
        Batch::new(
            &self.query_start_loc,
            lengths,
            self.boundaries_exact,
            Some(self.padded),
        )
        .unwrap()
    }

    /// Whether every row follows from what is told, however many drafts were rejected.
    fn is_known(&self, topk: i32) -> bool {
        let rows = self.query_start_loc.last().copied().unwrap_or(0);
        if rows == 0 {
            return true;
        }
        let saturated = self
            .query_start_loc
            .windows(2)
            .zip(&self.lengths)
            .all(|(pair, &bound)| {
                let query_len = i64::from(pair[1] - pair[0]);
                query_len == 0
                    || i64::from(bound) - i64::from(self.max_rejects) - query_len + 1 >= i64::from(topk)
            });
        self.boundaries_exact
            && match self.kind {
                0 => true,
                1 => self.max_rejects == 0 || saturated,
                _ => false,
            }
    }
}

/// Runs one input.
///
/// # Panics
///
/// If the device holds another plan than one from nothing after a step, or an action is not the one defined.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut history = History::new(&mut input);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        history.step(&mut input);
    }
}

impl History {
    fn new(input: &mut Input<'_>) -> Self {
        let choice = input.byte();
        let num_cus = [1, 2, 5, 40][usize::from(choice % 4)];
        let fold = 1 + input.below(3);
        let classes = input.pick(&[&[1_usize, 2, 4, 9, 16][..], &[16], &[3, 16]]);
        let topk = input.pick(&[1, 2, 17, 40, 300, i32::MAX / 16]);
        let split_budget = input.pick(&[None, Some(-1), Some(1), Some(3)]);
        let min_tokens_per_split = input.pick(&[8, 1, 128]);
        let policy = policy(input, choice / 4, topk);
        let config = StepConfig {
            max_requests: MAX_REQUESTS,
            topk,
            num_cus,
            fold,
            split_budget,
            min_tokens_per_split,
            policy,
            classes: classes
                .iter()
                .map(|&rows| layout(rows, num_cus, fold, policy.max_works(rows * fold, num_cus, topk)))
                .collect(),
        };
        let words = config.classes.last().unwrap().words;
        Self {
            planner: StepPlanner::new(config.clone()).unwrap(),
            config,
            device: vec![-5; words],
            staging: vec![-6; words],
            held: None,
            last: Truth::default(),
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0 => {
                self.device.fill(-7);
                self.planner.invalidate();
                self.held = None;
                self.nothing_waits();
            }
            1 => {
                self.device.fill(-8);
                self.planner.made_on_device();
                self.held = None;
                self.nothing_waits();
            }
            2 => self.refused(input),
            3 => {
                let told = self.told(input).1;
                let decision = self.planner.defer(&told.batch()).unwrap();
                assert_eq!(decision.action, Action::Deferred);
                self.check_numbers(&told, decision);
                self.device.fill(-9);
                self.held = None;
                self.nothing_waits();
            }
            _ => self.plan(input),
        }
    }

    /// Calls that need a decision to copy are refused without one.
    fn nothing_waits(&mut self) {
        let before = self.staging.clone();
        assert!(matches!(
            self.planner.write(&mut self.staging),
            Err(PlanError::State { .. })
        ));
        assert!(matches!(self.planner.commit(), Err(PlanError::State { .. })));
        assert_eq!(self.staging, before);
    }

    /// Batches beyond the capacity, or not known where there are no device arrays: what is held stays held.
    fn refused(&mut self, input: &mut Input<'_>) {
        let starts = match input.byte() % 4 {
            0 => vec![0, 17],
            1 => vec![0; MAX_REQUESTS + 2],
            2 => vec![0, i32::MAX],
            _ => vec![0, 1],
        };
        let batch = Batch::new(&starts, Lengths::Unknown, true, None).unwrap();
        let on_device = starts.len() != 2 || starts[1] != 1;
        let error = self.planner.decide(&batch, on_device, input.flag()).unwrap_err();
        assert!(!error.to_string().is_empty());
        if on_device {
            assert!(matches!(error, PlanError::Capacity { .. }));
            assert_eq!(self.planner.defer(&batch).unwrap_err(), error);
        } else {
            assert!(matches!(error, PlanError::State { .. }));
            self.nothing_waits();
        }
    }

    /// A step as the device sees it, and what the host is told of it.
    fn told(&mut self, input: &mut Input<'_>) -> (Truth, Told) {
        if !input.one_in(4) || self.last.query_start_loc.is_empty() {
            self.last = truth(input);
        } else if input.flag() {
            // One token further, as in a decode step.
            for length in &mut self.last.seq_lens {
                *length = length.saturating_add(1);
            }
        }
        let Truth {
            query_start_loc,
            seq_lens,
        } = self.last.clone();
        let rows = *query_start_loc.last().unwrap();
        let kind = input.byte() % 3;
        let max_rejects = if kind == 1 { i32::from(input.byte() % 6) } else { 0 };
        let mut told = Told {
            lengths: seq_lens
                .iter()
                .map(|length| length.saturating_add(i32::from(input.byte()) % (max_rejects + 1)))
                .collect(),
            query_start_loc,
            kind,
            max_rejects,
            boundaries_exact: true,
            padded: (i64::from(rows) + i64::from(input.byte() % 5)).min(16),
        };
        if input.byte() % 8 == 7 {
            // The device moved the boundaries: only their total is true.
            told.boundaries_exact = false;
            let last = told.query_start_loc.len() - 1;
            let guess: Vec<i32> = (1..last.max(1))
                .map(|_| i32::from(input.byte()) % (rows + 1))
                .collect();
            if let Some(inner) = told.query_start_loc.get_mut(1..last) {
                inner.copy_from_slice(&guess);
                inner.sort_unstable();
            }
        }
        (self.last.clone(), told)
    }

    fn plan(&mut self, input: &mut Input<'_>) {
        let (truth, told) = self.told(input);
        let is_known = told.is_known(self.config.topk);
        let (on_device, force) = (!is_known || input.flag(), input.byte() % 16 == 15);
        let decision = self.planner.decide(&told.batch(), on_device, force).unwrap();
        self.check_numbers(&told, decision);
        let layout = self.config.classes[decision.class];
        let expected = from_nothing(&truth, &layout, &self.config);
        let wanted = Some((decision.class, expected.clone()));
        let is_held = is_known && !force && self.held == wanted;
        let action = match (is_known, is_held) {
            (true, true) => Action::Nothing,
            (true, false) => Action::Copy,
            _ => Action::Launch,
        };
        assert_eq!(decision.action, action, "{told:?}");
        let says_so = decision.reasons.names().any(|name| name == "unchanged");
        assert_eq!(says_so, is_held);
        match action {
            Action::Copy if !self.copy(input, decision, &layout, &expected) => return,
            Action::Copy => self.held = wanted,
            Action::Launch => {
                self.nothing_waits();
                launch(&mut self.device, &expected, &layout, &self.config);
                self.held = None;
            }
            _ => self.nothing_waits(),
        }
        assert_eq!(content(&self.device, &layout, &self.config), expected, "{told:?}");
    }

    /// Nothing has reached the device: the planner may be told, and then what was held still is.
    fn give_up(&mut self, input: &mut Input<'_>, before: Held) {
        if input.flag() {
            self.planner.withdraw();
            self.nothing_waits();
            self.held = before;
        }
    }

    /// Carries a copy out, or part of it; says whether the device holds the plan then.
    fn copy(
        &mut self,
        input: &mut Input<'_>,
        decision: Decision,
        layout: &ClassLayout,
        expected: &[i32],
    ) -> bool {
        assert!(self.planner.commit().is_err(), "nothing is written yet");
        match input.byte() % 8 {
            0 => return false, // given up: what was held is held
            1 => {
                let before = self.staging[..layout.words - 1].to_vec();
                let error = self
                    .planner
                    .write(&mut self.staging[..layout.words - 1])
                    .unwrap_err();
                assert!(matches!(error, PlanError::Length { .. }));
                assert_eq!(self.staging[..layout.words - 1], before);
            }
            2 => {
                let busy = input.flag();
                let launched = self.planner.launch_instead(decision, busy).unwrap();
                assert_eq!(launched.action, Action::Launch);
                let before = self.held.take();
                if input.flag() {
                    self.give_up(input, before); // the launch failed
                    return false;
                }
                launch(&mut self.device, expected, layout, &self.config);
                self.planner.commit().unwrap();
                return true;
            }
            _ => {}
        }
        let mut gaps = self.staging.clone();
        let written = self.planner.write(&mut self.staging).unwrap();
        let before = self.held.take();
        assert_eq!(content(&self.staging, layout, &self.config), expected);
        let works = usize::try_from(self.staging[layout.offsets[2] + self.config.num_cus]).unwrap();
        assert_eq!(written.counts.num_works, works);
        assert_eq!(written.words, layout.offsets[4] + 8 * works);
        launch(&mut gaps, expected, layout, &self.config);
        assert_eq!(gaps, self.staging, "something was written outside the arrays");
        match input.byte() % 8 {
            0 => {
                self.give_up(input, before); // the copy was never queued
                return false;
            }
            1 => {
                // The copy failed half way.
                let part = input.below(256) * written.words / 256;
                self.device[..part].copy_from_slice(&self.staging[..part]);
                return false;
            }
            _ => {}
        }
        self.device[..written.words].copy_from_slice(&self.staging[..written.words]);
        self.planner.commit().unwrap();
        self.nothing_waits();
        true
    }

    fn check_numbers(&self, told: &Told, decision: Decision) {
        let rows = *told.query_start_loc.last().unwrap();
        assert_eq!(decision.rows, usize::try_from(rows).unwrap());
        assert_eq!(i64::try_from(decision.padded_rows).unwrap(), told.padded);
        let holds = |class: &ClassLayout| class.rows >= decision.padded_rows;
        assert_eq!(Some(decision.class), self.config.classes.iter().position(holds));
        assert!(decision.reasons.names().count() > 0);
        assert_eq!(
            decision.reasons.bits().count_ones(),
            u32::try_from(decision.reasons.names().count()).unwrap()
        );
    }
}

/// Up to 10 requests of together up to 16 rows, with contexts from 0 to the end of the type.
fn truth(input: &mut Input<'_>) -> Truth {
    let mut truth = Truth {
        query_start_loc: vec![0],
        seq_lens: Vec::new(),
    };
    let mut rows = 0;
    for _ in 0..input.below(MAX_REQUESTS + 1) {
        let query_len = match input.byte() {
            few @ 0..=239 => i32::from(few % 5),
            many => i32::from(many % 16),
        };
        let query_len = query_len.min(16 - rows);
        let context = match input.byte() {
            few @ 0..=99 => i32::from(few % 50),
            near @ 100..=199 => 270 + i32::from(near % 50),
            _ => input.any_i32().max(0),
        };
        rows += query_len;
        truth.query_start_loc.push(rows);
        truth
            .seq_lens
            .push(query_len.saturating_add(context).min(i32::MAX - 100));
    }
    truth
}

/// The policy by a few bits; more is read for others than aiter's only, so that older seeds say what they said.
fn policy(input: &mut Input<'_>, bits: u8, topk: i32) -> Policy {
    let mut table = || {
        input.pick(&[
            CostTable::AITER,
            CostTable::BF16_HEADS_16,
            CostTable::GFX942_FP8_HEADS_16,
        ])
    };
    match bits % 8 {
        4 | 5 => Policy::Balanced(table()),
        6 | 7 => Policy::Invariant {
            table: table(),
            // At most 32 pieces a row, so that the arrays stay small.
            piece_tokens: (topk / 32 + 1).max(i32::from(input.byte())),
        },
        _ => Policy::Aiter,
    }
}

fn layout(rows: usize, num_cus: usize, fold: usize, capacity: usize) -> ClassLayout {
    let tiles = rows * fold;
    // Gaps on purpose: nothing may be written between the arrays.
    let sizes = [rows, rows + 1, num_cus + 1, tiles + 1, 8 * capacity];
    let mut offsets = [0; 5];
    let mut words = 0;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = words + 3;
        words = *offset + size;
    }
    ClassLayout { rows, offsets, words }
}

/// Sizes of the live parts of a class's arrays, for so many works.
fn live_sizes(layout: &ClassLayout, config: &StepConfig, works: usize) -> [usize; 5] {
    let tiles = layout.rows * config.fold;
    [
        layout.rows,
        layout.rows + 1,
        config.num_cus + 1,
        tiles + 1,
        8 * works,
    ]
}

/// The live parts of a class's arrays, as one vector.
fn content(arena: &[i32], layout: &ClassLayout, config: &StepConfig) -> Vec<i32> {
    let works = usize::try_from(arena[layout.offsets[2] + config.num_cus]).unwrap();
    let sizes = live_sizes(layout, config, works);
    let arrays = layout.offsets.into_iter().zip(sizes);
    arrays
        .flat_map(|(offset, size)| arena[offset..offset + size].to_vec())
        .collect()
}

/// Writes a plan as the plan kernel does.
fn launch(arena: &mut [i32], plan: &[i32], layout: &ClassLayout, config: &StepConfig) {
    let fixed: usize = live_sizes(layout, config, 0).iter().sum();
    let mut rest = plan;
    for (offset, size) in layout
        .offsets
        .into_iter()
        .zip(live_sizes(layout, config, (plan.len() - fixed) / 8))
    {
        let (array, behind) = rest.split_at(size);
        arena[offset..offset + size].copy_from_slice(array);
        rest = behind;
    }
    assert!(rest.is_empty());
}

/// The same as [`content`], made from the true arrays by functions that know nothing of steps.
fn from_nothing(truth: &Truth, layout: &ClassLayout, config: &StepConfig) -> Vec<i32> {
    let lengths = row_lengths(&truth.query_start_loc, &truth.seq_lens, config.topk, None).unwrap();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let budget = config.split_budget.unwrap_or_else(|| match config.policy {
        Policy::Balanced(table) => split_budget(longest, &table, config.num_cus).unwrap(),
        _ => max_split_per_batch(
            longest.into(),
            config.topk,
            config.num_cus,
            config.min_tokens_per_split,
        )
        .unwrap(),
    });
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
    let mut content = request_ids(&truth.query_start_loc, Some(layout.rows)).unwrap();
    indptr.resize(layout.rows + 1, *indptr.last().unwrap());
    content.extend(indptr);
    content.extend(&plan.work_indptr);
    let mut reduce = plan.reduce_indptr;
    reduce.resize(layout.rows * config.fold + 1, *reduce.last().unwrap());
    content.extend(reduce);
    content.extend(&plan.work_info);
    content
}

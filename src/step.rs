//! From one batch to the next: what has to be done so that the device holds the new plan, and why.

use crate::batch::Batch;
use crate::fingerprint::{Fingerprint, Knowledge};
pub use crate::layout::ClassLayout;
use crate::layout::{check_classes, split_arrays};
use crate::rows::{MAX_ROWS, check_topk, fill_request_ids};
use crate::schedule::{EmptyRows, Policy, ScheduleCounts, ScheduleParams, Variant, write_schedule_near};
use crate::split::{max_split_per_batch, split_budget};
use crate::{Expected, PlanError, Rule};

/// What a planner is made for. Nothing in it changes afterwards.
#[derive(Debug, Clone)]
pub struct StepConfig {
    /// Most requests of a batch.
    pub max_requests: usize,
    /// Longest row, in tokens.
    pub topk: i32,
    /// Compute units.
    pub num_cus: usize,
    /// Planner rows per token row.
    pub fold: usize,
    /// -1 for no limit, at least 1 for a number, `None` for a rule on the longest row: the cheapest number of pieces by the
    /// cost table under [`Policy::Balanced`], work per split else. [`Policy::Invariant`] has no budget.
    pub split_budget: Option<i32>,
    /// Tokens per split that the rule aims for.
    pub min_tokens_per_split: i32,
    /// How the rows are placed.
    pub policy: Policy,
    /// The classes of row counts, ascending; the last one is the capacity.
    pub classes: Vec<ClassLayout>,
}

/// What the caller has to do for one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing: the device holds the plan.
    Nothing,
    /// [`write`](StepPlanner::write) the plan, copy it, [`commit`](StepPlanner::commit).
    Copy,
    /// Launch the plan kernel over the device's own arrays.
    Launch,
    /// Nothing now: the first consumer makes the plan on the device.
    Deferred,
}

/// Why an action was taken, as a set of bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reasons(u32);

impl Reasons {
    /// Names of the reasons, by bit.
    pub const NAMES: [&'static str; 15] = [
        "unchanged",
        "saturation proven by bound",
        "first plan",
        "invalidated",
        "made on the device before",
        "other row class",
        "boundaries changed",
        "lengths changed",
        "boundaries unknown",
        "lengths unknown",
        "bound not saturated",
        "deferred",
        "forced",
        "staging busy",
        "schedule_maker is device",
    ];
    const UNCHANGED: Self = Self(1);
    const SATURATED: Self = Self(1 << 1);
    const FIRST: Self = Self(1 << 2);
    const INVALIDATED: Self = Self(1 << 3);
    const ON_DEVICE: Self = Self(1 << 4);
    const CLASS: Self = Self(1 << 5);
    const BOUNDARIES: Self = Self(1 << 6);
    const LENGTHS: Self = Self(1 << 7);
    const BOUNDARIES_UNKNOWN: Self = Self(1 << 8);
    const LENGTHS_UNKNOWN: Self = Self(1 << 9);
    const BOUND_NOT_SATURATED: Self = Self(1 << 10);
    const DEFERRED: Self = Self(1 << 11);
    const FORCED: Self = Self(1 << 12);
    const STAGING_BUSY: Self = Self(1 << 13);
    const DEVICE_MAKES: Self = Self(1 << 14);

    /// The bits, numbered as [`NAMES`](Self::NAMES).
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Names of the reasons in the set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES
            .into_iter()
            .enumerate()
            .filter(move |(bit, _)| self.0 >> bit & 1 == 1)
            .map(|(_, name)| name)
    }

    fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn with_if(self, condition: bool, other: Self) -> Self {
        if condition { self.with(other) } else { self }
    }
}

/// What a step asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// What has to be done.
    pub action: Action,
    /// Why.
    pub reasons: Reasons,
    /// Rows that belong to a request, as the host counts them.
    pub rows: usize,
    /// Rows that the consumer sees.
    pub padded_rows: usize,
    /// Position of the batch's class in [`StepConfig::classes`].
    pub class: usize,
}

/// What was written for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Words from the base that the copy has to carry.
    pub words: usize,
    /// The schedule's counts.
    pub counts: ScheduleCounts,
    /// Split budget that was used; -1 for no limit.
    pub split_budget: i32,
}

/// Why the device's content is not known, or that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The plan of the held fingerprint in this class.
    Plan { class: usize },
    /// Nothing that the host knows, and the reason.
    Unknown(Reasons),
}

/// Remembers what the device holds and decides what the next batch needs.
///
/// A step is [`decide`](Self::decide), then for [`Action::Copy`] also [`write`](Self::write) and, once the copy is
/// queued, [`commit`](Self::commit), at the latest before the next decision. After construction no call allocates.
#[derive(Debug)]
pub struct StepPlanner {
    config: StepConfig,
    held: Held,
    current: Fingerprint,
    next: Fingerprint,
    /// Class of the plan in `next`, from the decision to copy until it is committed or given up.
    pending: Option<usize>,
    /// What was held before `next` was written out; `None` until then, and only afterwards is committing it right.
    before: Option<Held>,
    /// A longest row and its budget: it changes less often than the plan.
    budget: (i32, i32),
    /// Where the balanced schedule that was written last was found: that of the next plan is looked for there first.
    hint: Option<u64>,
}

impl StepPlanner {
    /// A planner whose device buffers hold nothing yet.
    ///
    /// # Errors
    ///
    /// [`PlanError`] naming the setting that is out of range, or the class whose layout is too small or overlaps.
    pub fn new(config: StepConfig) -> Result<Self, PlanError> {
        check_topk(config.topk)?;
        check_max_requests(config.max_requests)?;
        schedule_params(&config, config.split_budget.unwrap_or(-1)).validate()?;
        max_split_per_batch(1, config.topk, config.num_cus, config.min_tokens_per_split)?;
        check_classes(&config)?;
        let capacity = config.max_requests;
        Ok(Self {
            config,
            held: Held::Unknown(Reasons::FIRST),
            current: Fingerprint::with_capacity(capacity),
            next: Fingerprint::with_capacity(capacity),
            pending: None,
            before: None,
            budget: (-1, 1),
            hint: None,
        })
    }

    /// What the planner was made for.
    pub fn config(&self) -> &StepConfig {
        &self.config
    }

    /// Decides what the device needs so that it holds the plan of `batch`.
    ///
    /// A launch forgets what is held, since only the device will know. `on_device` says whether the batch comes with the
    /// device's own arrays; `force` asks for a new plan though nothing changed.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if the batch exceeds the capacity, or a launch is needed without device arrays. What is held stays
    /// held; a plan that was waiting to be written is given up.
    pub fn decide(&mut self, batch: &Batch<'_>, on_device: bool, force: bool) -> Result<Decision, PlanError> {
        let class = self.class_of(batch)?;
        let knowledge = self.next.take(batch, self.config.topk);
        self.pending = None;
        self.before = None;
        let reasons = Reasons::default()
            .with_if(knowledge == Knowledge::Saturated, Reasons::SATURATED)
            .with_if(force, Reasons::FORCED);
        let (action, reasons) = if knowledge.is_known() {
            let changes = self.changes(class);
            if changes == Reasons::default() && !force {
                (Action::Nothing, reasons.with(Reasons::UNCHANGED))
            } else {
                self.pending = Some(class);
                (Action::Copy, reasons.with(changes))
            }
        } else {
            if !on_device {
                return Err(PlanError::State {
                    message: "device_query_start_loc and device_seq_lens are needed: the host does not know every row of this batch",
                });
            }
            self.held = Held::Unknown(Reasons::ON_DEVICE);
            (Action::Launch, reasons.with(unknown(knowledge)))
        };
        Ok(decision(batch, class, action, reasons))
    }

    /// Leaves the plan to the first consumer: checks the batch and forgets what is held.
    ///
    /// A captured graph that the batch is replayed through makes the plan without a word to the host, so nothing is
    /// known of the buffers afterwards.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if the batch exceeds the capacity. Nothing has changed then.
    pub fn defer(&mut self, batch: &Batch<'_>) -> Result<Decision, PlanError> {
        let class = self.class_of(batch)?;
        self.forget(Reasons::ON_DEVICE);
        Ok(decision(batch, class, Action::Deferred, Reasons::DEFERRED))
    }

    /// Writes the plan that [`decide`](Self::decide) asked to copy into a staging area laid out as its class.
    ///
    /// What is held is forgotten first: from here on until the commit, a failed copy leaves the device's content unknown.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if no copy was asked for, or the area is smaller than the class. Nothing has changed then.
    pub fn write(&mut self, staging: &mut [i32]) -> Result<Written, PlanError> {
        let Some(class) = self.pending else {
            return Err(PlanError::State {
                message: "no plan is waiting to be written",
            });
        };
        let layout = self.config.classes[class];
        if staging.len() < layout.words {
            return Err(PlanError::Length {
                argument: "staging",
                actual: staging.len(),
                expected: Expected::AtLeast(layout.words),
            });
        }
        let budget = self.split_budget()?;
        let (mut arrays, request_ids, kv_indptr) = split_arrays(staging, &layout, &self.config);
        fill_request_ids(self.next.query_start_loc(), request_ids);
        self.next.fill_kv_indptr(self.config.topk, kv_indptr);
        let live = &kv_indptr[..=self.next.num_rows()];
        let params = schedule_params(&self.config, budget);
        let counts = write_schedule_near(live, &params, &mut arrays, &mut self.hint)?;
        self.hold_nothing();
        Ok(Written {
            words: layout.offsets[4] + 8 * counts.num_works,
            counts,
            split_budget: budget,
        })
    }

    /// The budget of the plan in `next`.
    fn split_budget(&mut self) -> Result<i32, PlanError> {
        let config = &self.config;
        if let Some(budget) = config.split_budget {
            return Ok(budget);
        }
        let longest = self.next.longest_row(config.topk);
        // Blocks decide under `balanced`, and a row that grows by a token seldom has one more.
        let longest = match config.policy {
            Policy::Balanced(table) => table.whole_blocks(longest),
            Policy::Aiter | Policy::Invariant { .. } => longest,
        };
        if longest != self.budget.0 {
            let budget = match config.policy {
                Policy::Balanced(table) => split_budget(longest, &table, config.num_cus)?,
                Policy::Invariant { .. } => -1,
                Policy::Aiter => max_split_per_batch(
                    longest.into(),
                    config.topk,
                    config.num_cus,
                    config.min_tokens_per_split,
                )?,
            };
            self.budget = (longest, budget);
        }
        Ok(self.budget.1)
    }

    /// Remembers the plan that was written: its copy is queued, and what reads the buffers comes after it.
    ///
    /// # Errors
    ///
    /// [`PlanError::State`] if nothing was written since the last decision.
    pub fn commit(&mut self) -> Result<(), PlanError> {
        match (self.pending, self.before) {
            (Some(class), Some(_)) => {
                std::mem::swap(&mut self.current, &mut self.next);
                self.held = Held::Plan { class };
                self.pending = None;
                self.before = None;
                Ok(())
            }
            _ => Err(PlanError::State {
                message: "no plan was written that could be committed",
            }),
        }
    }

    /// Gives up the plan that waits for its commit, of which nothing has reached the device: what was held still is.
    pub fn withdraw(&mut self) {
        if let Some(before) = self.before.take() {
            self.held = before;
        }
        self.pending = None;
    }

    /// Says that the device made or will make a plan of its own: nothing is held afterwards.
    pub fn made_on_device(&mut self) {
        self.forget(Reasons::ON_DEVICE);
    }

    /// Turns a decision to copy into one to launch the plan kernel, which makes the same plan.
    ///
    /// As after [`write`](Self::write), nothing is held until the [`commit`](Self::commit) that follows the launch.
    ///
    /// # Errors
    ///
    /// [`PlanError::State`] if no copy was asked for.
    pub fn launch_instead(&mut self, decision: Decision, staging_busy: bool) -> Result<Decision, PlanError> {
        if self.pending != Some(decision.class) {
            return Err(PlanError::State {
                message: "no plan is waiting to be written",
            });
        }
        self.hold_nothing();
        let why = if staging_busy {
            Reasons::STAGING_BUSY
        } else {
            Reasons::DEVICE_MAKES
        };
        Ok(Decision {
            action: Action::Launch,
            reasons: decision.reasons.with(why),
            ..decision
        })
    }

    /// Forgets what the device holds: its buffers were discarded, moved or written by somebody else.
    pub fn invalidate(&mut self) {
        self.forget(Reasons::INVALIDATED);
    }

    /// From here on until the commit the device may hold anything.
    fn hold_nothing(&mut self) {
        self.before.get_or_insert(self.held);
        self.held = Held::Unknown(Reasons::INVALIDATED);
    }

    fn forget(&mut self, why: Reasons) {
        self.held = Held::Unknown(why);
        self.pending = None;
        self.before = None;
    }

    /// How the plan in `next` differs from what the device holds.
    fn changes(&self, class: usize) -> Reasons {
        match self.held {
            Held::Unknown(why) => why,
            Held::Plan { class: held } => {
                let same_boundaries = self.next.same_boundaries(&self.current);
                Reasons::default()
                    .with_if(held != class, Reasons::CLASS)
                    .with_if(!same_boundaries, Reasons::BOUNDARIES)
                    .with_if(
                        same_boundaries && !self.next.same_contexts(&self.current),
                        Reasons::LENGTHS,
                    )
            }
        }
    }

    /// The smallest class that holds the batch.
    fn class_of(&self, batch: &Batch<'_>) -> Result<usize, PlanError> {
        let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        if batch.num_requests() > self.config.max_requests {
            return Err(PlanError::Capacity {
                what: "max_requests",
                needed: as_number(batch.num_requests()),
                available: as_number(self.config.max_requests),
            });
        }
        let classes = &self.config.classes;
        let class = classes.partition_point(|class| class.rows < batch.padded_rows());
        if class == classes.len() {
            return Err(PlanError::Capacity {
                what: "max_rows",
                needed: as_number(batch.padded_rows()),
                available: classes.last().map_or(0, |class| as_number(class.rows)),
            });
        }
        Ok(class)
    }
}

fn decision(batch: &Batch<'_>, class: usize, action: Action, reasons: Reasons) -> Decision {
    Decision {
        action,
        reasons,
        rows: batch.num_rows(),
        padded_rows: batch.padded_rows(),
        class,
    }
}

fn unknown(knowledge: Knowledge) -> Reasons {
    match knowledge {
        Knowledge::BoundariesUnknown => Reasons::BOUNDARIES_UNKNOWN,
        Knowledge::LengthsUnknown => Reasons::LENGTHS_UNKNOWN,
        Knowledge::BoundNotSaturated => Reasons::BOUND_NOT_SATURATED,
        Knowledge::Exact | Knowledge::Saturated => Reasons::default(),
    }
}

fn schedule_params(config: &StepConfig, budget: i32) -> ScheduleParams {
    ScheduleParams {
        num_cus: config.num_cus,
        max_split_per_batch: budget,
        fold: config.fold,
        // The variants differ in empty rows only, and a batch that the host knows has none.
        variant: Variant::Parallel,
        empty_rows: EmptyRows::Skip,
        policy: config.policy,
    }
}

/// Checks the requests against [`MAX_ROWS`], since room for each is allocated beforehand.
fn check_max_requests(max_requests: usize) -> Result<(), PlanError> {
    let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    if max_requests > MAX_ROWS {
        return Err(PlanError::Number {
            argument: "max_requests",
            value: as_number(max_requests),
            rule: Rule::AtMost(as_number(MAX_ROWS)),
        });
    }
    Ok(())
}

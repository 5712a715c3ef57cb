//! The step planner for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};

use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arrays::{int32, int32_mut};
use super::costs::{CostsArgument, policy_of};
use super::numbers::Number;
use crate::batch::{Batch, Lengths};
use crate::step::{Action, ClassLayout, StepConfig};

/// What a step asks for, and what was written for it.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct Decision {
    asked: crate::step::Decision,
    /// Boxed, because most steps write nothing and a small object is made faster.
    written: Option<Box<crate::step::Written>>,
    ticket: u64,
}

impl Decision {
    fn unwritten(decision: crate::step::Decision) -> Self {
        Self {
            asked: decision,
            written: None,
            ticket: 0,
        }
    }
}

#[pymethods]
impl Decision {
    #[getter]
    fn action(&self) -> &'static str {
        action_name(self.asked.action)
    }

    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.asked.reasons.names().collect::<Vec<_>>())
    }

    /// Action and reasons in one number, to count by.
    #[getter]
    fn key(&self) -> u64 {
        (u64::from(self.asked.reasons.bits()) << 2) | self.asked.action as u64
    }

    #[getter]
    fn rows(&self) -> usize {
        self.asked.rows
    }

    #[getter]
    fn padded_rows(&self) -> usize {
        self.asked.padded_rows
    }

    /// Position of the batch's row class among the planner's classes.
    #[getter]
    fn row_class(&self) -> usize {
        self.asked.class
    }

    /// Words that a copy has to carry; 0 where nothing was written.
    #[getter]
    fn words(&self) -> usize {
        self.written.as_ref().map_or(0, |written| written.words)
    }

    #[getter]
    fn num_works(&self) -> Option<usize> {
        self.written.as_ref().map(|written| written.counts.num_works)
    }

    #[getter]
    fn split_budget(&self) -> Option<i32> {
        self.written.as_ref().map(|written| written.split_budget)
    }

    /// Number of what is on its way to the device; 0 if nothing is.
    #[getter]
    fn ticket(&self) -> u64 {
        self.ticket
    }

    fn __repr__(&self) -> String {
        let reasons: Vec<_> = self.asked.reasons.names().collect();
        format!(
            "Decision(action={:?}, reasons={reasons:?}, rows={}, padded_rows={})",
            action_name(self.asked.action),
            self.asked.rows,
            self.asked.padded_rows
        )
    }
}

/// Remembers what a device holds and decides what the next batch needs.
///
/// The lock makes it safe to share between threads; a step takes microseconds, so nobody waits long.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct StepPlanner(Mutex<Steps>);

/// The core's planner, and the number of the last plan that was sent on its way.
#[derive(Debug)]
struct Steps {
    planner: crate::step::StepPlanner,
    /// Whether plans that the host knows are launched too, where there are device arrays.
    device_makes: bool,
    ticket: u64,
}

impl Steps {
    /// Commits the plan of this number, unless another one was sent or what is held was forgotten since.
    fn arrived(&mut self, ticket: u64) {
        if ticket == self.ticket {
            let _forgotten_since = self.planner.commit();
        }
    }

    fn sent(&mut self, decision: crate::step::Decision, written: Option<crate::step::Written>) -> Decision {
        self.ticket += 1;
        Decision {
            asked: decision,
            written: written.map(Box::new),
            ticket: self.ticket,
        }
    }

    fn write(&mut self, decision: crate::step::Decision, staging: &Bound<'_, PyAny>) -> PyResult<Decision> {
        let mut staging = int32_mut("staging", staging)?;
        let written = self.planner.write(staging.as_slice_mut()?)?;
        Ok(self.sent(decision, Some(written)))
    }

    fn launch_instead(&mut self, decision: crate::step::Decision, staging_busy: bool) -> PyResult<Decision> {
        let decision = self.planner.launch_instead(decision, staging_busy)?;
        Ok(self.sent(decision, None))
    }
}

impl StepPlanner {
    /// No call panics while it holds the lock, so a poisoned one still guards whole state.
    fn lock(&self) -> MutexGuard<'_, Steps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepPlanner {
    #[new]
    #[pyo3(
        signature = (
            *, max_requests, topk, num_cus, fold, split_budget, min_tokens_per_split, classes, policy="aiter",
            cost_table=None, piece_tokens=None, device_makes=false
        )
    )]
    #[expect(clippy::too_many_arguments, reason = "named on the Python side")]
    fn new(
        max_requests: Number,
        topk: Number,
        num_cus: Number,
        fold: Number,
        split_budget: Option<Number>,
        min_tokens_per_split: Number,
        classes: &Bound<'_, PyAny>,
        policy: &str,
        cost_table: Option<CostsArgument>,
        piece_tokens: Option<Number>,
        device_makes: bool,
    ) -> PyResult<Self> {
        let table = cost_table.map(CostsArgument::table).transpose()?;
        let config = StepConfig {
            max_requests: max_requests.positive("max_requests")?,
            topk: topk.int32("topk")?,
            num_cus: num_cus.positive("num_cus")?,
            fold: fold.positive("fold")?,
            split_budget: split_budget
                .map(|budget| budget.int32("split_budget"))
                .transpose()?,
            min_tokens_per_split: min_tokens_per_split.int32("min_tokens_per_split")?,
            classes: class_layouts(classes)?,
            policy: policy_of(policy, table, piece_tokens)?,
        };
        let planner = crate::step::StepPlanner::new(config)?;
        Ok(Self(Mutex::new(Steps {
            planner,
            device_makes,
            ticket: 0,
        })))
    }

    #[pyo3(
        signature = (
            query_start_loc, lengths, max_rejects, padded_rows, boundaries_exact, on_device, force, arrived=0,
            staging=None
        )
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "one crossing per step; the Python caller names them in Batch"
    )]
    fn decide(
        &self,
        query_start_loc: &Bound<'_, PyAny>,
        lengths: Option<&Bound<'_, PyAny>>,
        max_rejects: Option<Number>,
        padded_rows: Option<Number>,
        boundaries_exact: bool,
        on_device: bool,
        force: bool,
        arrived: u64,
        staging: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Decision> {
        let arrays = BatchArrays::borrow(query_start_loc, lengths, max_rejects)?;
        let batch = arrays.batch(boundaries_exact, padded_rows)?;
        let mut steps = self.lock();
        steps.arrived(arrived);
        let decision = steps.planner.decide(&batch, on_device, force)?;
        match (decision.action, staging) {
            (Action::Copy, _) if steps.device_makes && on_device => steps.launch_instead(decision, false),
            (Action::Copy, Some(staging)) => steps.write(decision, staging),
            _ => Ok(Decision::unwritten(decision)),
        }
    }

    #[pyo3(signature = (query_start_loc, lengths, max_rejects, padded_rows, boundaries_exact))]
    fn defer(
        &self,
        query_start_loc: &Bound<'_, PyAny>,
        lengths: Option<&Bound<'_, PyAny>>,
        max_rejects: Option<Number>,
        padded_rows: Option<Number>,
        boundaries_exact: bool,
    ) -> PyResult<Decision> {
        let arrays = BatchArrays::borrow(query_start_loc, lengths, max_rejects)?;
        let batch = arrays.batch(boundaries_exact, padded_rows)?;
        Ok(Decision::unwritten(self.lock().planner.defer(&batch)?))
    }

    fn write(&self, decision: &Decision, staging: &Bound<'_, PyAny>) -> PyResult<Decision> {
        self.lock().write(decision.asked, staging)
    }

    fn launch_instead(&self, decision: &Decision) -> PyResult<Decision> {
        self.lock().launch_instead(decision.asked, true)
    }

    fn withdraw(&self) {
        self.lock().planner.withdraw();
    }

    fn made_on_device(&self) {
        self.lock().planner.made_on_device();
    }

    fn invalidate(&self) {
        self.lock().planner.invalidate();
    }
}

/// The borrowed arrays of a batch; they outlive the core's view of it.
struct BatchArrays<'py> {
    query_start_loc: PyReadonlyArray1<'py, i32>,
    lengths: Option<PyReadonlyArray1<'py, i32>>,
    max_rejects: Option<i32>,
}

impl<'py> BatchArrays<'py> {
    fn borrow(
        query_start_loc: &Bound<'py, PyAny>,
        lengths: Option<&Bound<'py, PyAny>>,
        max_rejects: Option<Number>,
    ) -> PyResult<Self> {
        let name = if max_rejects.is_some() {
            "seq_lens_bound"
        } else {
            "seq_lens"
        };
        if lengths.is_none() && max_rejects.is_some() {
            return Err(PyValueError::new_err(
                "max_rejects is given without seq_lens_bound",
            ));
        }
        Ok(Self {
            query_start_loc: int32("query_start_loc", query_start_loc)?,
            lengths: lengths.map(|lengths| int32(name, lengths)).transpose()?,
            max_rejects: max_rejects
                .map(|rejects| rejects.int32("max_rejects"))
                .transpose()?,
        })
    }

    fn batch(&self, boundaries_exact: bool, padded_rows: Option<Number>) -> PyResult<Batch<'_>> {
        let padded_rows = padded_rows.map(|rows| rows.whole("padded_rows")).transpose()?;
        let lengths = match (&self.lengths, self.max_rejects) {
            (None, _) => Lengths::Unknown,
            (Some(seq_lens), None) => Lengths::Exact(seq_lens.as_slice()?),
            (Some(bound), Some(max_rejects)) => Lengths::UpperBound {
                bound: bound.as_slice()?,
                max_rejects,
            },
        };
        Ok(Batch::new(
            self.query_start_loc.as_slice()?,
            lengths,
            boundaries_exact,
            padded_rows,
        )?)
    }
}

fn class_layouts(classes: &Bound<'_, PyAny>) -> PyResult<Vec<ClassLayout>> {
    let classes: Vec<(usize, [usize; 5], usize)> = classes.extract().map_err(|error| {
        PyValueError::new_err(format!(
            "classes must be a list of (rows, five offsets, words), none negative: {error}"
        ))
    })?;
    Ok(classes
        .into_iter()
        .map(|(rows, offsets, words)| ClassLayout { rows, offsets, words })
        .collect())
}

fn action_name(action: Action) -> &'static str {
    match action {
        Action::Nothing => "nothing",
        Action::Copy => "copy",
        Action::Launch => "launch",
        Action::Deferred => "deferred",
    }
}

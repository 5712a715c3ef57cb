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

/// What a step asks for.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct Decision(crate::step::Decision);

#[pymethods]
impl Decision {
    #[getter]
    fn action(&self) -> &'static str {
        action_name(self.0.action)
    }

    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.reasons.names().collect::<Vec<_>>())
    }

    /// Action and reasons in one number, to count by.
    #[getter]
    fn key(&self) -> u64 {
        (u64::from(self.0.reasons.bits()) << 2) | self.0.action as u64
    }

    #[getter]
    fn rows(&self) -> usize {
        self.0.rows
    }

    #[getter]
    fn padded_rows(&self) -> usize {
        self.0.padded_rows
    }

    /// Position of the batch's row class among the planner's classes.
    #[getter]
    fn row_class(&self) -> usize {
        self.0.class
    }

    fn __repr__(&self) -> String {
        let reasons: Vec<_> = self.0.reasons.names().collect();
        format!(
            "Decision(action={:?}, reasons={reasons:?}, rows={}, padded_rows={})",
            action_name(self.0.action),
            self.0.rows,
            self.0.padded_rows
        )
    }
}

/// What was written into a staging area.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct Written(crate::step::Written);

#[pymethods]
impl Written {
    #[getter]
    fn words(&self) -> usize {
        self.0.words
    }

    #[getter]
    fn num_works(&self) -> usize {
        self.0.counts.num_works
    }

    #[getter]
    fn num_partials(&self) -> usize {
        self.0.counts.num_partials
    }

    #[getter]
    fn num_slots(&self) -> usize {
        self.0.counts.num_slots
    }

    #[getter]
    fn split_budget(&self) -> i32 {
        self.0.split_budget
    }
}

/// Remembers what a device holds and decides what the next batch needs.
///
/// The lock makes it safe to share between threads; a step takes microseconds, so nobody waits long.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct StepPlanner(Mutex<crate::step::StepPlanner>);

impl StepPlanner {
    /// No call panics while it holds the lock, so a poisoned one still guards whole state.
    fn lock(&self) -> MutexGuard<'_, crate::step::StepPlanner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepPlanner {
    #[new]
    #[pyo3(
        signature = (
            *, max_requests, topk, num_cus, fold, split_budget, min_tokens_per_split, classes, policy="aiter",
            cost_table=None, piece_tokens=None
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
        Ok(Self(Mutex::new(crate::step::StepPlanner::new(config)?)))
    }

    #[pyo3(signature = (query_start_loc, lengths, max_rejects, padded_rows, boundaries_exact, on_device, force))]
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
    ) -> PyResult<Decision> {
        let arrays = BatchArrays::borrow(query_start_loc, lengths, max_rejects)?;
        let batch = arrays.batch(boundaries_exact, padded_rows)?;
        Ok(Decision(self.lock().decide(&batch, on_device, force)?))
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
        Ok(Decision(self.lock().defer(&batch)?))
    }

    fn write(&self, staging: &Bound<'_, PyAny>) -> PyResult<Written> {
        let mut staging = int32_mut("staging", staging)?;
        Ok(Written(self.lock().write(staging.as_slice_mut()?)?))
    }

    fn commit(&self) -> PyResult<()> {
        Ok(self.lock().commit()?)
    }

    fn made_on_device(&self) {
        self.lock().made_on_device();
    }

    fn launch_instead(&self, decision: &Decision, staging_busy: bool) -> PyResult<Decision> {
        Ok(Decision(self.lock().launch_instead(decision.0, staging_busy)?))
    }

    fn invalidate(&self) {
        self.lock().invalidate();
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

//! Schedules and their safety.

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;

use super::arrays::{freeze, freeze_rows, int32};
use super::costs::{CostsArgument, policy_of};
use super::numbers::Number;
use crate::PlanError;
use crate::rows::MAX_ROWS;
use crate::schedule::{CostTable, EmptyRows, ScheduleParams, Variant, WORK_WORDS, first_unsafe_work};

/// A schedule that owns its arrays; they are frozen, so handing out the same ones is safe.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct Schedule {
    #[pyo3(get)]
    work_indptr: Py<PyArray1<i32>>,
    #[pyo3(get)]
    work_info: Py<PyArray2<i32>>,
    #[pyo3(get)]
    reduce_indptr: Py<PyArray1<i32>>,
    #[pyo3(get)]
    reduce_final_map: Py<PyArray2<i32>>,
    #[pyo3(get)]
    reduce_partial_map: Py<PyArray1<i32>>,
    #[pyo3(get)]
    num_works: usize,
    #[pyo3(get)]
    num_partials: usize,
    #[pyo3(get)]
    num_slots: usize,
    #[pyo3(get)]
    blocks_per_slot: i64,
    /// Slot and work of the first empty work that later works of its slot come after.
    #[pyo3(get)]
    first_unsafe_work: Option<(usize, usize)>,
    #[pyo3(get)]
    finish_time: u64,
    #[pyo3(get)]
    lower_bound: u64,
}

#[pymethods]
impl Schedule {
    /// Whether a decode kernel may run it: an empty work ends its slot in aiter's kernels.
    #[getter]
    fn is_safe(&self) -> bool {
        self.first_unsafe_work.is_none()
    }

    fn __repr__(&self) -> String {
        format!(
            "Schedule(num_works={}, num_partials={}, num_slots={}, finish_time={}, lower_bound={}, is_safe={})",
            self.num_works,
            self.num_partials,
            self.num_slots,
            self.finish_time,
            self.lower_bound,
            if self.is_safe() { "True" } else { "False" }
        )
    }
}

#[pyfunction]
#[pyo3(
    signature = (
        kv_indptr, *, num_cus, max_split_per_batch=Number::Whole(-1), fold=Number::Whole(1), variant="parallel",
        policy="aiter", skip_empty=false, cost_table=None, piece_tokens=None
    ),
    // Written out because a negative default is not rendered.
    text_signature = "(kv_indptr, *, num_cus, max_split_per_batch=-1, fold=1, variant='parallel', policy='aiter', \
                      skip_empty=False, cost_table=None, piece_tokens=None)"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "a fixed public signature, named on the Python side"
)]
pub(super) fn schedule(
    py: Python<'_>,
    kv_indptr: &Bound<'_, PyAny>,
    num_cus: Number,
    max_split_per_batch: Number,
    fold: Number,
    variant: &str,
    policy: &str,
    skip_empty: bool,
    cost_table: Option<CostsArgument>,
    piece_tokens: Option<Number>,
) -> PyResult<Schedule> {
    let table = cost_table.map(CostsArgument::table).transpose()?;
    let params = ScheduleParams {
        num_cus: num_cus.positive("num_cus")?,
        max_split_per_batch: max_split_per_batch.int32("max_split_per_batch")?,
        fold: fold.positive("fold")?,
        variant: match variant {
            "parallel" => Variant::Parallel,
            "serial" => Variant::Serial,
            _ => {
                let known = "\"parallel\", \"serial\"";
                return Err(PlanError::Name {
                    argument: "variant",
                    value: variant.into(),
                    known,
                }
                .into());
            }
        },
        empty_rows: if skip_empty {
            EmptyRows::Skip
        } else {
            EmptyRows::Aiter
        },
        policy: policy_of(policy, table, piece_tokens)?,
    };
    let indptr = int32("kv_indptr", kv_indptr)?;
    check_tiles(indptr.as_slice()?.len(), &params)?;
    let made = crate::schedule::schedule(indptr.as_slice()?, &params)?;
    let quality = made.quality(&table.unwrap_or(CostTable::AITER));
    Ok(Schedule {
        num_works: made.counts.num_works,
        num_partials: made.counts.num_partials,
        num_slots: made.counts.num_slots,
        blocks_per_slot: made.counts.blocks_per_slot,
        first_unsafe_work: first_unsafe_work(&made.work_indptr, &made.work_info),
        finish_time: quality.finish_time,
        lower_bound: quality.lower_bound,
        work_indptr: freeze(py, made.work_indptr)?.unbind(),
        work_info: freeze_rows(py, made.work_info, WORK_WORDS)?.unbind(),
        reduce_indptr: freeze(py, made.reduce_indptr)?.unbind(),
        reduce_final_map: freeze_rows(py, made.reduce_final_map, 2)?.unbind(),
        reduce_partial_map: freeze(py, made.reduce_partial_map)?.unbind(),
    })
}

/// Checks that the fold does not turn a few megabytes of input into gigabytes of works.
fn check_tiles(entries: usize, params: &ScheduleParams) -> Result<(), PlanError> {
    params.validate()?;
    let tiles = entries.saturating_sub(1).saturating_mul(params.fold);
    if tiles > MAX_ROWS {
        let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let what = "rows x fold of kv_indptr";
        return Err(PlanError::Capacity {
            what,
            needed: as_number(tiles),
            available: as_number(MAX_ROWS),
        });
    }
    Ok(())
}

//! Schedules, their cost and their safety.

use numpy::{PyArray1, PyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::arrays::{freeze, freeze_rows, int32};
use super::numbers::Number;
use crate::rows::MAX_ROWS;
use crate::schedule::quality::{CostTable as Costs, finish_time, lower_bound};
use crate::schedule::{EmptyRows, ScheduleParams, Variant, WORK_WORDS, first_unsafe_work};
use crate::{Expected, PlanError, Rule};

const COST_TABLES: [(&str, Costs); 7] = [
    ("aiter", Costs::AITER),
    ("bf16 16", Costs::BF16_HEADS_16),
    ("bf16/fp8 16", Costs::BF16_FP8_HEADS_16),
    ("gfx942 fp8 16", Costs::GFX942_FP8_HEADS_16),
    ("gfx942 fp8 64", Costs::GFX942_FP8_HEADS_64),
    ("gfx942 fp8 128", Costs::GFX942_FP8_HEADS_128),
    ("gfx950 bf16 64", Costs::GFX950_BF16_HEADS_64),
];

/// What works cost on one kernel.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct CostTable(Costs);

#[pymethods]
impl CostTable {
    #[new]
    #[pyo3(signature = (*, block_tokens, block, piece, whole, slot))]
    fn new(
        block_tokens: Number,
        block: Number,
        piece: Number,
        whole: Number,
        slot: Number,
    ) -> PyResult<Self> {
        let block_tokens = block_tokens.uint32("block_tokens")?;
        if block_tokens == 0 {
            let rule = Rule::AtLeast(1);
            return Err(PlanError::Number {
                argument: "block_tokens",
                value: 0,
                rule,
            }
            .into());
        }
        Ok(Self(Costs {
            block_tokens,
            block: block.uint32("block")?,
            piece: piece.uint32("piece")?,
            whole: whole.uint32("whole")?,
            slot: slot.uint32("slot")?,
        }))
    }

    #[staticmethod]
    fn named(name: &str) -> PyResult<Self> {
        let found = COST_TABLES.iter().find(|(known, _)| *known == name);
        found.map(|(_, costs)| Self(*costs)).ok_or_else(|| {
            let known: Vec<_> = COST_TABLES.iter().map(|(known, _)| *known).collect();
            PyValueError::new_err(format!("name is {name:?}, known are {}", known.join(", ")))
        })
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.0.block_tokens
    }

    #[getter]
    fn block(&self) -> u32 {
        self.0.block
    }

    #[getter]
    fn piece(&self) -> u32 {
        self.0.piece
    }

    #[getter]
    fn whole(&self) -> u32 {
        self.0.whole
    }

    #[getter]
    fn slot(&self) -> u32 {
        self.0.slot
    }

    fn finish_time(&self, work_indptr: &Bound<'_, PyAny>, work_info: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slots = int32("work_indptr", work_indptr)?;
        let works = int32("work_info", work_info)?;
        let (slots, works) = (slots.as_slice()?, works.as_slice()?);
        check_works(slots, works)?;
        Ok(finish_time(slots, works, &self.0))
    }

    #[pyo3(
        signature = (row_lengths, num_slots, *, fold=Number::Whole(1)),
        text_signature = "($self, row_lengths, num_slots, *, fold=1)"
    )]
    fn lower_bound(&self, row_lengths: &Bound<'_, PyAny>, num_slots: Number, fold: Number) -> PyResult<u64> {
        let lengths = int32("row_lengths", row_lengths)?;
        let lengths = lengths.as_slice()?;
        if let Some(index) = lengths.iter().position(|&length| length < 0) {
            return Err(negative("row_lengths", index, lengths[index]).into());
        }
        Ok(lower_bound(
            lengths,
            fold.positive("fold")?,
            num_slots.positive("num_slots")?,
            &self.0,
        ))
    }
}

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
        policy="aiter", skip_empty=false
    ),
    // Written out because a negative default is not rendered.
    text_signature = "(kv_indptr, *, num_cus, max_split_per_batch=-1, fold=1, variant='parallel', policy='aiter', \
                      skip_empty=False)"
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
) -> PyResult<Schedule> {
    if policy != "aiter" {
        return Err(PlanError::Name {
            argument: "policy",
            value: policy.into(),
            known: "\"aiter\"",
        }
        .into());
    }
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
    };
    let indptr = int32("kv_indptr", kv_indptr)?;
    check_tiles(indptr.as_slice()?.len(), &params)?;
    let made = crate::schedule::schedule(indptr.as_slice()?, &params)?;
    let quality = made.quality(&Costs::AITER);
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

/// Checks that slots are in order and name works that are there.
fn check_works(work_indptr: &[i32], work_info: &[i32]) -> Result<(), PlanError> {
    let expected = Expected::MultipleOf(WORK_WORDS);
    if !work_info.len().is_multiple_of(WORK_WORDS) {
        return Err(PlanError::Length {
            argument: "work_info",
            actual: work_info.len(),
            expected,
        });
    }
    let num_works = i64::try_from(work_info.len() / WORK_WORDS).unwrap_or(i64::MAX);
    let mut previous = 0;
    for (index, &entry) in work_indptr.iter().enumerate() {
        let rule = if entry < 0 {
            Rule::AtLeast(0)
        } else if entry < previous {
            Rule::NotBelowPrevious(previous.into())
        } else if i64::from(entry) > num_works {
            Rule::AtMost(num_works)
        } else {
            previous = entry;
            continue;
        };
        return Err(PlanError::Entry {
            argument: "work_indptr",
            index,
            value: entry.into(),
            rule,
        });
    }
    Ok(())
}

fn negative(argument: &'static str, index: usize, value: i32) -> PlanError {
    PlanError::Entry {
        argument,
        index,
        value: value.into(),
        rule: Rule::AtLeast(0),
    }
}

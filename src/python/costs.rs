//! What works cost, and the policies that place works by it.

use pyo3::Borrowed;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arrays::int32;
use super::numbers::Number;
use super::support::dtype;
use crate::schedule::quality::{finish_time, lower_bound};
use crate::schedule::{CostTable as Costs, Policy, WORK_WORDS};
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
#[pyclass(frozen, eq, hash, module = "mlaplan._core")]
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct CostTable(Costs);

#[pymethods]
impl CostTable {
    #[new]
    #[pyo3(
        signature = (*, block_tokens, block, piece, whole, slot, merge=Number::Whole(0), cut=Number::Whole(0)),
        text_signature = "(*, block_tokens, block, piece, whole, slot, merge=0, cut=0)"
    )]
    fn new(
        block_tokens: Number,
        block: Number,
        piece: Number,
        whole: Number,
        slot: Number,
        merge: Number,
        cut: Number,
    ) -> PyResult<Self> {
        costs([block_tokens, block, piece, whole, slot, merge, cut]).map(Self)
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

    #[getter]
    fn merge(&self) -> u32 {
        self.0.merge
    }

    #[getter]
    fn cut(&self) -> u32 {
        self.0.cut
    }

    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let table = &self.0;
        let fields = [
            table.block_tokens,
            table.block,
            table.piece,
            table.whole,
            table.slot,
            table.merge,
            table.cut,
        ];
        PyTuple::new(py, fields)
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
            return Err(PlanError::Entry {
                argument: "row_lengths",
                index,
                value: lengths[index].into(),
                rule: Rule::AtLeast(0),
            }
            .into());
        }
        Ok(lower_bound(
            lengths,
            fold.positive("fold")?,
            num_slots.positive("num_slots")?,
            &self.0,
        ))
    }

    fn __repr__(&self) -> String {
        let Costs {
            block_tokens,
            block,
            piece,
            whole,
            slot,
            merge,
            cut,
        } = self.0;
        format!(
            "CostTable(block_tokens={block_tokens}, block={block}, piece={piece}, whole={whole}, slot={slot}, merge={merge}, cut={cut})"
        )
    }
}

fn costs(fields: [Number; 7]) -> PyResult<Costs> {
    let [block_tokens, block, piece, whole, slot, merge, cut] = fields;
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
    Ok(Costs {
        block_tokens,
        block: block.uint32("block")?,
        piece: piece.uint32("piece")?,
        whole: whole.uint32("whole")?,
        slot: slot.uint32("slot")?,
        merge: merge.uint32("merge")?,
        cut: cut.uint32("cut")?,
    })
}

/// A cost table as an argument: the object, or its seven numbers.
#[derive(Debug)]
pub(super) enum CostsArgument {
    Table(Costs),
    Fields(Box<[Number; 7]>),
    /// Something else, of that type.
    Other(String),
}

impl<'py> FromPyObject<'_, 'py> for CostsArgument {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(table) = value.cast::<CostTable>() {
            return Ok(Self::Table(table.get().0));
        }
        match value.extract::<(Number, Number, Number, Number, Number, Number, Number)>() {
            Ok((block_tokens, block, piece, whole, slot, merge, cut)) => Ok(Self::Fields(Box::new([
                block_tokens,
                block,
                piece,
                whole,
                slot,
                merge,
                cut,
            ]))),
            Err(_) => Ok(Self::Other(value.get_type().name()?.to_string())),
        }
    }
}

impl CostsArgument {
    pub(super) fn table(self) -> PyResult<Costs> {
        match self {
            Self::Table(table) => Ok(table),
            Self::Fields(fields) => costs(*fields),
            Self::Other(kind) => Err(PyTypeError::new_err(format!(
                "cost_table must be a CostTable or a tuple (block_tokens, block, piece, whole, slot, merge, cut), not {kind}"
            ))),
        }
    }
}

/// The policy of that name.
pub(super) fn policy_of(name: &str, table: Option<Costs>, piece_tokens: Option<Number>) -> PyResult<Policy> {
    let needed = || PyValueError::new_err(format!("cost_table is None, must be given with policy {name:?}"));
    match name {
        "aiter" => Ok(Policy::Aiter),
        "balanced" => Ok(Policy::Balanced(table.ok_or_else(needed)?)),
        "invariant" => {
            let Some(piece_tokens) = piece_tokens else {
                let message = "piece_tokens is None, must be given with policy \"invariant\"";
                return Err(PyValueError::new_err(message));
            };
            Ok(Policy::Invariant {
                table: table.ok_or_else(needed)?,
                piece_tokens: piece_tokens.int32("piece_tokens")?,
            })
        }
        _ => Err(PlanError::Name {
            argument: "policy",
            value: name.into(),
            known: "\"aiter\", \"balanced\", \"invariant\"",
        }
        .into()),
    }
}

#[pyfunction]
pub(super) fn cost_table(
    arch: &str,
    heads: Number,
    q_dtype: &str,
    kv_dtype: &str,
) -> PyResult<Option<CostTable>> {
    let (q, kv) = (dtype("q_dtype", q_dtype)?, dtype("kv_dtype", kv_dtype)?);
    let found = crate::schedule::cost::cost_table(arch.parse()?, heads.positive("heads")?, q, kv);
    Ok(found.map(CostTable))
}

#[pyfunction]
#[pyo3(signature = (longest_row, *, cost_table, num_cus))]
pub(super) fn split_budget(longest_row: Number, cost_table: CostsArgument, num_cus: Number) -> PyResult<i32> {
    let (longest, table) = (longest_row.int32("longest_row")?, cost_table.table()?);
    Ok(crate::split::split_budget(
        longest,
        &table,
        num_cus.positive("num_cus")?,
    )?)
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

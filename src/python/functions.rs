//! Rows and the split budget.

use numpy::PyArray1;
use pyo3::prelude::*;

use super::arrays::{freeze, int32};
use super::numbers::Number;

type Int32Array<'py> = Bound<'py, PyArray1<i32>>;

#[pyfunction]
pub(super) fn segment_lengths<'py>(
    py: Python<'py>,
    query_start_loc: &Bound<'py, PyAny>,
) -> PyResult<Int32Array<'py>> {
    let boundaries = int32("query_start_loc", query_start_loc)?;
    freeze(py, crate::rows::segment_lengths(boundaries.as_slice()?)?)
}

#[pyfunction]
#[pyo3(signature = (query_start_loc, padded_rows=None))]
pub(super) fn request_ids<'py>(
    py: Python<'py>,
    query_start_loc: &Bound<'py, PyAny>,
    padded_rows: Option<Number>,
) -> PyResult<Int32Array<'py>> {
    let boundaries = int32("query_start_loc", query_start_loc)?;
    let padded = padded_rows.map(|rows| rows.count("padded_rows")).transpose()?;
    freeze(py, crate::rows::request_ids(boundaries.as_slice()?, padded)?)
}

#[pyfunction]
#[pyo3(signature = (query_start_loc, seq_lens, topk, padded_rows=None))]
pub(super) fn row_lengths<'py>(
    py: Python<'py>,
    query_start_loc: &Bound<'py, PyAny>,
    seq_lens: &Bound<'py, PyAny>,
    topk: Number,
    padded_rows: Option<Number>,
) -> PyResult<Int32Array<'py>> {
    let boundaries = int32("query_start_loc", query_start_loc)?;
    let lengths = int32("seq_lens", seq_lens)?;
    let topk = topk.int32("topk")?;
    let padded = padded_rows.map(|rows| rows.count("padded_rows")).transpose()?;
    freeze(
        py,
        crate::rows::row_lengths(boundaries.as_slice()?, lengths.as_slice()?, topk, padded)?,
    )
}

#[pyfunction]
pub(super) fn kv_indptr<'py>(py: Python<'py>, row_lengths: &Bound<'py, PyAny>) -> PyResult<Int32Array<'py>> {
    let lengths = int32("row_lengths", row_lengths)?;
    freeze(py, crate::rows::kv_indptr(lengths.as_slice()?)?)
}

#[pyfunction]
#[pyo3(
    signature = (max_seq_len, *, topk, num_cus, min_tokens_per_split=Number::Whole(128)),
    text_signature = "(max_seq_len, *, topk, num_cus, min_tokens_per_split=128)"
)]
pub(super) fn max_split_per_batch(
    max_seq_len: Number,
    topk: Number,
    num_cus: Number,
    min_tokens_per_split: Number,
) -> PyResult<i32> {
    Ok(crate::split::max_split_per_batch(
        max_seq_len.whole("max_seq_len")?,
        topk.int32("topk")?,
        num_cus.positive("num_cus")?,
        min_tokens_per_split.int32("min_tokens_per_split")?,
    )?)
}

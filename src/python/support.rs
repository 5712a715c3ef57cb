//! What aiter can do with a shape, and how large its buffers are.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::numbers::Number;
use crate::PlanError;
use crate::schedule::Variant;
use crate::support::{Arch, Dtype, Release};

/// The support table's answer for one shape.
#[pyclass(frozen, module = "mlaplan._core")]
#[derive(Debug)]
pub(super) struct Support(crate::support::Support);

#[pymethods]
impl Support {
    #[getter]
    fn fold(&self) -> usize {
        self.0.fold
    }

    #[getter]
    fn native(&self) -> bool {
        self.0.native
    }

    #[getter]
    fn padded_heads(&self) -> usize {
        self.0.padded_heads
    }

    #[getter]
    fn persistent(&self) -> bool {
        self.0.persistent
    }

    #[getter]
    fn non_persistent(&self) -> bool {
        self.0.non_persistent
    }

    #[getter]
    fn lse(&self) -> bool {
        self.0.lse
    }

    #[getter]
    fn plan_used(&self) -> bool {
        self.0.plan_used
    }

    #[getter]
    fn variant(&self) -> Option<&'static str> {
        self.0.variant.map(|variant| match variant {
            Variant::Parallel => "parallel",
            Variant::Serial => "serial",
        })
    }

    #[getter]
    fn reason(&self) -> &str {
        &self.0.reason
    }

    fn __repr__(&self) -> String {
        format!(
            "Support(fold={}, persistent={}, reason={:?})",
            self.0.fold,
            if self.0.persistent { "True" } else { "False" },
            self.0.reason
        )
    }
}

#[pyfunction]
#[pyo3(signature = (arch, heads, q_dtype, kv_dtype, *, rows=None, aiter_version=None))]
pub(super) fn support(
    arch: &str,
    heads: Number,
    q_dtype: &str,
    kv_dtype: &str,
    rows: Option<Number>,
    aiter_version: Option<&str>,
) -> PyResult<Support> {
    let release = match aiter_version {
        Some(version) => version.parse()?,
        None => Release::NEWEST,
    };
    let heads = heads.positive("heads")?;
    let rows = rows.map(|rows| rows.count("rows")).transpose()?;
    let (q, kv) = (dtype("q_dtype", q_dtype)?, dtype("kv_dtype", kv_dtype)?);
    Ok(Support(crate::support::support(
        arch.parse()?,
        heads,
        q,
        kv,
        rows,
        release,
    )))
}

#[pyfunction]
#[pyo3(signature = (max_rows, heads, *, arch, num_cus, q_dtype, kv_dtype))]
pub(super) fn buffer_shapes<'py>(
    py: Python<'py>,
    max_rows: Number,
    heads: Number,
    arch: &str,
    num_cus: Number,
    q_dtype: &str,
    kv_dtype: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let (arch, q, kv): (Arch, Dtype, Dtype) = (
        arch.parse()?,
        dtype("q_dtype", q_dtype)?,
        dtype("kv_dtype", kv_dtype)?,
    );
    let (max_rows, heads) = (max_rows.positive("max_rows")?, heads.positive("heads")?);
    let shapes = crate::support::buffer_shapes(max_rows, heads, arch, num_cus.positive("num_cus")?, q, kv)?;
    let dict = PyDict::new(py);
    dict.set_item("work_metadata_ptrs", (shapes.work_metadata_ptrs,))?;
    dict.set_item("work_indptr", (shapes.work_indptr,))?;
    dict.set_item(
        "work_info_set",
        (shapes.work_info_set[0], shapes.work_info_set[1]),
    )?;
    dict.set_item("reduce_indptr", (shapes.reduce_indptr,))?;
    dict.set_item(
        "reduce_final_map",
        (shapes.reduce_final_map[0], shapes.reduce_final_map[1]),
    )?;
    dict.set_item("reduce_partial_map", (shapes.reduce_partial_map,))?;
    Ok(dict)
}

/// Reads a dtype; the error says which of the two it was.
pub(super) fn dtype(argument: &'static str, name: &str) -> Result<Dtype, PlanError> {
    name.parse().map_err(|error| match error {
        PlanError::Name { value, known, .. } => PlanError::Name {
            argument,
            value,
            known,
        },
        other => other,
    })
}

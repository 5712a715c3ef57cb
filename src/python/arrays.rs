//! `NumPy` in and out. Nothing is copied at the boundary: inputs are borrowed, results move.

use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Borrows a one-dimensional int32 array.
///
/// The exact dtype is asked for, since a silent cast would be a copy. `try_` so that a conflicting borrow is an
/// exception and not a panic.
pub(super) fn int32<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, i32>> {
    let array = cast(name, value)?;
    let borrowed = array
        .try_readonly()
        .map_err(|_| PyTypeError::new_err(format!("{name} is being written to by another call")))?;
    check_layout(name, array)?;
    Ok(borrowed)
}

/// Borrows a one-dimensional int32 array to write into it.
pub(super) fn int32_mut<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArray1<'py, i32>> {
    let array = cast(name, value)?;
    let borrowed = array.try_readwrite().map_err(|_| {
        PyTypeError::new_err(format!("{name} is read-only, or is being used by another call"))
    })?;
    check_layout(name, array)?;
    Ok(borrowed)
}

/// Checks what a slice of Rust needs.
fn check_layout(name: &str, array: &Bound<'_, PyArray1<i32>>) -> PyResult<()> {
    if !array.is_contiguous() {
        return Err(PyValueError::new_err(format!("{name} must be contiguous")));
    }
    if !array.data().is_aligned() {
        return Err(PyValueError::new_err(format!(
            "{name} must be aligned to 4 bytes"
        )));
    }
    Ok(())
}

/// Moves a vector into a read-only array.
pub(super) fn freeze(py: Python<'_>, values: Vec<i32>) -> PyResult<Bound<'_, PyArray1<i32>>> {
    let array = values.into_pyarray(py);
    array.try_readwrite()?.make_nonwriteable();
    Ok(array)
}

/// Moves a vector into a read-only two-dimensional array of `columns` columns.
pub(super) fn freeze_rows(
    py: Python<'_>,
    values: Vec<i32>,
    columns: usize,
) -> PyResult<Bound<'_, PyArray2<i32>>> {
    let rows = values.len() / columns;
    // Frozen first: of a view of an array that can be written, NumPy would let the reader lift the flag again.
    freeze(py, values)?.reshape([rows, columns])
}

fn cast<'a, 'py>(name: &str, value: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyArray1<i32>>> {
    value.cast::<PyArray1<i32>>().map_err(|_| {
        let actual = match value.cast::<PyUntypedArray>() {
            Ok(array) => format!("{} of {} dimensions", array.dtype(), array.ndim()),
            Err(_) => value
                .get_type()
                .name()
                .map_or_else(|_| "something else".into(), |name| name.to_string()),
        };
        PyTypeError::new_err(format!(
            "{name} must be a one-dimensional int32 NumPy array, not {actual}"
        ))
    })
}

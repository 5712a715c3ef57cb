//! The core's error as a Python exception: the one place where it is mapped.

use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

use crate::PlanError as Core;

pyo3::create_exception!(
    mlaplan._core,
    PlanError,
    PyValueError,
    "The input is well formed, but this planner cannot plan it: it exceeds a capacity, or something is missing."
);

impl From<Core> for PyErr {
    fn from(error: Core) -> Self {
        let message = error.to_string();
        match error {
            Core::Length { .. } | Core::Entry { .. } | Core::Number { .. } | Core::Name { .. } => {
                PyValueError::new_err(message)
            }
            Core::Capacity { .. } | Core::State { .. } => PlanError::new_err(message),
        }
    }
}

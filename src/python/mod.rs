//! The extension module. The only folder that names Python.

mod arrays;
mod costs;
mod error;
mod functions;
mod numbers;
mod schedule;
mod step;
mod support;

#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::costs::{CostTable, cost_table, split_budget};
    #[pymodule_export]
    use super::error::PlanError;
    #[pymodule_export]
    use super::functions::{kv_indptr, max_split_per_batch, request_ids, row_lengths, segment_lengths};
    #[pymodule_export]
    use super::schedule::{Schedule, schedule};
    #[pymodule_export]
    use super::step::{Decision, StepPlanner};
    #[pymodule_export]
    use super::support::{Support, buffer_shapes, support};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        // So that a benchmark can refuse to time a debug build.
        module.add(
            "build_profile",
            if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
        )
    }
}

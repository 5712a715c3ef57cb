//! Host core of mlaplan: plans sparse MLA decode.

pub mod batch;
mod error;
pub mod fingerprint;
pub mod rows;
pub mod schedule;
pub mod split;
pub mod step;
pub mod support;

#[cfg(feature = "python")]
mod python;

pub use error::{Expected, PlanError, Rule};

//! Host core of mlaplan: plans sparse MLA decode.
//!
//! A *batch* is where each request's query tokens start and how long each KV sequence is. One query token is one *row*, which
//! attends to `min(context + i + 1, topk)` KV tokens. A *plan* is the rows, the running sum of their lengths (`kv_indptr`, in
//! tokens) and a *schedule*: which compute unit works on which piece of which row. [`step::StepPlanner`] turns each step's
//! batch into what a device still needs so that it holds the plan; the other modules are its parts.
//!
//! Counts are `usize`, everything that a kernel reads is `i32`, and sums are made in 64 bits where they could pass that.
//!
//! ```
//! use mlaplan::rows::{kv_indptr, row_lengths};
//!
//! // Two requests: one query token after 4,999 others, and a prompt of four.
//! let lengths = row_lengths(&[0, 1, 5], &[5000, 4], 2048, None)?;
//! assert_eq!(lengths, [2048, 1, 2, 3, 4]);
//! assert_eq!(kv_indptr(&lengths)?, [0, 2048, 2049, 2051, 2054, 2058]);
//! # Ok::<(), mlaplan::PlanError>(())
//! ```

pub mod batch;
mod error;
pub mod fingerprint;
mod layout;
pub mod rows;
pub mod schedule;
pub mod split;
pub mod step;
pub mod support;

#[cfg(feature = "python")]
mod python;

pub use error::{Expected, PlanError, Rule};

//! What the fuzzers run: each target turns bytes into calls and compares the results with a definition written here.
//!
//! `tests/fuzz_seeds.rs` includes this file, so that the seeds run on stable and without cargo-fuzz as well.

#![expect(clippy::unwrap_used, reason = "a panic is how a target reports what it found")]

pub mod batch;
mod input;
mod policies;
pub mod schedule;
pub mod step;

//! Every seed of the fuzzers through its target, where neither a nightly compiler nor cargo-fuzz is needed.

use std::path::Path;

#[path = "../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "the fuzzers include it as a library")]
mod targets;

/// Runs the seeds of one target; a panic is a failure, and the seed's name is printed with it.
fn replay(name: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/seeds")
        .join(name);
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .expect("fuzz/seeds lies in the repository")
        .map(|entry| entry.expect("the folder can be read").path())
        .collect();
    paths.sort();
    assert!(paths.len() >= 20, "only {} seeds of {name}", paths.len());
    for path in paths {
        let seed = std::fs::read(&path).expect("a seed is a file");
        let done = std::panic::catch_unwind(|| run(&seed));
        assert!(done.is_ok(), "{name} fails on {}", path.display());
    }
    run(&[]);
}

#[test]
fn batches_of_every_seed_are_judged_as_defined() {
    replay("batch", targets::batch::run);
}

#[test]
fn schedules_of_every_seed_keep_their_promises() {
    replay("schedule", targets::schedule::run);
}

#[test]
fn steps_of_every_seed_leave_the_plan_from_nothing() {
    replay("step", targets::step::run);
}

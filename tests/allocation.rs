//! The step path allocates nothing after construction: the serving loop must not meet the allocator.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use allocation_counter::measure;
use mlaplan::batch::{Batch, Lengths};
use mlaplan::schedule::{CostTable, Policy};
use mlaplan::step::{Action, ClassLayout, StepConfig, StepPlanner};

const ROWS: usize = 64;
const NUM_CUS: usize = 40;

fn planner(policy: Policy) -> StepPlanner {
    let works = policy.max_works(ROWS, NUM_CUS, 2048);
    let sizes = [ROWS, ROWS + 1, NUM_CUS + 1, ROWS + 1, 8 * works];
    let mut offsets = [0; 5];
    for array in 1..5 {
        offsets[array] = offsets[array - 1] + sizes[array - 1];
    }
    StepPlanner::new(StepConfig {
        max_requests: ROWS,
        topk: 2048,
        num_cus: NUM_CUS,
        fold: 1,
        split_budget: None,
        min_tokens_per_split: 128,
        policy,
        classes: vec![ClassLayout {
            rows: ROWS,
            offsets,
            words: offsets[4] + sizes[4],
        }],
    })
    .unwrap()
}

#[test]
fn a_thousand_steps_of_every_kind_allocate_nothing() {
    let table = CostTable::BF16_HEADS_16;
    let piece_tokens = 256;
    for policy in [
        Policy::Aiter,
        Policy::Balanced(table),
        Policy::Invariant { table, piece_tokens },
    ] {
        a_thousand_steps_allocate_nothing(policy);
    }
}

fn a_thousand_steps_allocate_nothing(policy: Policy) {
    let mut planner = planner(policy);
    let mut staging = vec![0; planner.config().classes[0].words];
    let boundaries: Vec<i32> = (0..=64).collect();
    let mut seq_lens = vec![1900; 64];
    let mut taken = [0; 4];
    let counted = measure(|| {
        for step in 0..1000_i32 {
            let changed = step % 3 == 0;
            for length in seq_lens.iter_mut().filter(|_| changed) {
                *length += 1;
            }
            let requests = if step % 7 == 0 { 64 } else { 40 };
            let lengths = match step % 5 {
                0 => Lengths::Unknown,
                1 => Lengths::UpperBound {
                    bound: &seq_lens[..requests],
                    max_rejects: 3,
                },
                _ => Lengths::Exact(&seq_lens[..requests]),
            };
            let batch = Batch::new(&boundaries[..=requests], lengths, true, Some(64)).unwrap();
            let decision = if step % 11 == 0 {
                planner.defer(&batch).unwrap()
            } else {
                planner.decide(&batch, true, false).unwrap()
            };
            taken[decision.action as usize] += 1;
            if decision.action == Action::Copy {
                planner.write(&mut staging).unwrap();
                planner.commit().unwrap();
            }
        }
    });
    assert_eq!(counted.count_total, 0);
    assert!(
        taken.iter().all(|&times| times > 0),
        "every action was taken: {taken:?}"
    );
}

#[test]
fn the_counter_sees_an_allocation() {
    let counted = measure(|| drop(mlaplan::rows::segment_lengths(&[0, 1])));
    assert!(counted.count_total > 0);
}

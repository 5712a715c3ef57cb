//! The step planner over random histories, against plans from nothing made by the crate's separate functions.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use mlaplan::PlanError;
use mlaplan::batch::{Batch, Lengths};
use mlaplan::rows::{kv_indptr, request_ids, row_lengths};
use mlaplan::schedule::{CostTable, EmptyRows, Policy, ScheduleParams, Variant, schedule};
use mlaplan::split::{max_split_per_batch, split_budget};
use mlaplan::step::{Action, ClassLayout, StepConfig, StepPlanner};
use proptest::prelude::*;

const TOPK: i32 = 40;

fn layout(rows: usize, num_cus: usize, fold: usize, policy: Policy) -> ClassLayout {
    let tiles = rows * fold;
    // Gaps on purpose: nothing may be written between the arrays.
    let works = policy.max_works(tiles, num_cus, TOPK);
    let sizes = [rows, rows + 1, num_cus + 1, tiles + 1, 8 * works];
    let mut offsets = [0; 5];
    let mut end = 0;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = end + 3;
        end = *offset + size;
    }
    ClassLayout {
        rows,
        offsets,
        words: end,
    }
}

fn config(num_cus: usize, fold: usize, split_budget: Option<i32>, policy: Policy) -> StepConfig {
    StepConfig {
        max_requests: 12,
        topk: TOPK,
        num_cus,
        fold,
        split_budget,
        min_tokens_per_split: 8,
        classes: [2, 4, 9, 16]
            .into_iter()
            .map(|rows| layout(rows, num_cus, fold, policy))
            .collect(),
        policy,
    }
}

/// The live parts of a class's arrays, as one vector.
fn content(arena: &[i32], layout: &ClassLayout, config: &StepConfig) -> Vec<i32> {
    let tiles = layout.rows * config.fold;
    let works = usize::try_from(arena[layout.offsets[2] + config.num_cus]).unwrap();
    let sizes = [
        layout.rows,
        layout.rows + 1,
        config.num_cus + 1,
        tiles + 1,
        8 * works,
    ];
    let arrays = layout.offsets.into_iter().zip(sizes);
    arrays
        .flat_map(|(offset, size)| arena[offset..offset + size].to_vec())
        .collect()
}

/// The same from nothing.
fn from_nothing(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    layout: &ClassLayout,
    config: &StepConfig,
) -> Vec<i32> {
    let lengths = row_lengths(query_start_loc, seq_lens, TOPK, None).unwrap();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let budget = config.split_budget.unwrap_or_else(|| match config.policy {
        Policy::Balanced(table) => split_budget(longest, &table, config.num_cus).unwrap(),
        _ => max_split_per_batch(longest.into(), TOPK, config.num_cus, config.min_tokens_per_split).unwrap(),
    });
    let mut indptr = kv_indptr(&lengths).unwrap();
    let plan = schedule(
        &indptr,
        &ScheduleParams {
            num_cus: config.num_cus,
            max_split_per_batch: budget,
            fold: config.fold,
            variant: Variant::Parallel,
            empty_rows: EmptyRows::Skip,
            policy: config.policy,
        },
    )
    .unwrap();
    let mut content = request_ids(query_start_loc, Some(layout.rows)).unwrap();
    indptr.resize(layout.rows + 1, *indptr.last().unwrap());
    content.extend(indptr);
    content.extend(&plan.work_indptr);
    let mut reduce = plan.reduce_indptr.clone();
    reduce.resize(layout.rows * config.fold + 1, *reduce.last().unwrap());
    content.extend(reduce);
    content.extend(&plan.work_info);
    content
}

/// One step of a history: query tokens and context of each request, what the host knows, and what comes before.
#[derive(Debug, Clone)]
struct Step {
    requests: Vec<(u8, u8)>,
    again: bool,
    knowledge: u8,
    slack: u8,
    padded: u8,
    before: u8,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let request = (0_u8..4, prop_oneof![0_u8..6, 30_u8..48, Just(200)]);
    let step = (
        proptest::collection::vec(request, 0..5),
        any::<bool>(),
        0_u8..5,
        0_u8..4,
        0_u8..5,
        0_u8..10,
    )
        .prop_map(|(requests, again, knowledge, slack, padded, before)| Step {
            requests,
            again,
            knowledge,
            slack,
            padded,
            before,
        });
    proptest::collection::vec(step, 1..60)
}

fn policies() -> impl Strategy<Value = Policy> {
    // Pieces are dear and so is their merge, so that the budget changes with the longest row.
    let table = CostTable {
        block_tokens: 4,
        block: 10,
        piece: 7,
        whole: 9,
        slot: 1,
        merge: 6,
        cut: 5,
    };
    prop_oneof![
        Just(Policy::Aiter),
        Just(Policy::Balanced(table)),
        Just(Policy::Balanced(CostTable::BF16_HEADS_16)),
        (1..50_i32).prop_map(move |piece_tokens| Policy::Invariant { table, piece_tokens }),
    ]
}

fn arrays(requests: &[(u8, u8)]) -> (Vec<i32>, Vec<i32>) {
    let mut query_start_loc = vec![0];
    for &(query_len, _) in requests {
        query_start_loc.push(query_start_loc.last().unwrap() + i32::from(query_len));
    }
    let seq_lens = requests
        .iter()
        .map(|&(query_len, context)| i32::from(query_len) + i32::from(context));
    (query_start_loc, seq_lens.collect())
}

fn run(config: &StepConfig, history: &[Step]) -> Result<(), TestCaseError> {
    let mut planner = StepPlanner::new(config.clone()).unwrap();
    let words = config.classes.last().unwrap().words;
    let mut device = vec![-5; words];
    let mut staging = vec![-6; words];
    let mut last: Vec<(u8, u8)> = Vec::new();
    for step in history {
        let requests = if step.again {
            last.clone()
        } else {
            step.requests.clone()
        };
        last.clone_from(&requests);
        let (query_start_loc, seq_lens) = arrays(&requests);
        match step.before {
            0 => {
                device.fill(-7);
                planner.invalidate();
            }
            1 => {
                let wrong = Batch::new(&[0, 300], Lengths::Exact(&[300]), true, None).unwrap();
                prop_assert!(planner.decide(&wrong, true, false).is_err());
                prop_assert!(planner.commit().is_err());
            }
            2 => {
                // A plan that was decided on and never carried out.
                let other = Batch::new(&[0, 1], Lengths::Exact(&[1]), true, None).unwrap();
                planner.decide(&other, true, false).unwrap();
            }
            _ => {}
        }
        let rejects = i32::from(step.slack);
        let bound: Vec<i32> = seq_lens
            .iter()
            .zip(0..)
            .map(|(length, i)| length + i % (rejects + 1))
            .collect();
        let lengths = match step.knowledge {
            0 => Lengths::Unknown,
            1 | 2 => Lengths::UpperBound {
                bound: &bound,
                max_rejects: rejects,
            },
            _ => Lengths::Exact(&seq_lens),
        };
        let rows = i64::from(*query_start_loc.last().unwrap());
        let batch = Batch::new(
            &query_start_loc,
            lengths,
            true,
            Some((rows + i64::from(step.padded)).min(16)),
        )
        .unwrap();
        if step.before == 3 {
            planner.defer(&batch).unwrap();
            device.fill(-8);
            continue;
        }
        let decision = planner.decide(&batch, true, false).unwrap();
        let class = config.classes[decision.class];
        let expected = from_nothing(&query_start_loc, &seq_lens, &class, config);
        match decision.action {
            Action::Nothing => {}
            Action::Copy => {
                let gap_before = staging[..class.offsets[0]].to_vec();
                let written = planner.write(&mut staging).unwrap();
                prop_assert_eq!(&staging[..class.offsets[0]], &gap_before[..]);
                device[..written.words].copy_from_slice(&staging[..written.words]);
                planner.commit().unwrap();
            }
            // What the plan kernel does.
            Action::Launch => {
                prop_assert!(step.knowledge < 3, "exact lengths never need the device");
                let mut rest = expected.as_slice();
                let tiles = class.rows * config.fold;
                for (offset, size) in class.offsets.into_iter().zip([
                    class.rows,
                    class.rows + 1,
                    config.num_cus + 1,
                    tiles + 1,
                    usize::MAX,
                ]) {
                    let (array, behind) = rest.split_at(size.min(rest.len()));
                    device[offset..offset + array.len()].copy_from_slice(array);
                    rest = behind;
                }
            }
            Action::Deferred => prop_assert!(false, "decide never defers"),
        }
        prop_assert_eq!(content(&device, &class, config), expected);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_device_always_holds_the_plan_from_nothing(
        history in steps(),
        num_cus in prop_oneof![Just(1_usize), Just(5), Just(40)],
        fold in 1_usize..4,
        budget in prop_oneof![Just(None), Just(Some(-1)), Just(Some(1)), Just(Some(3))],
        policy in policies(),
    ) {
        run(&config(num_cus, fold, budget, policy), &history)?;
    }
}

#[test]
fn an_unchanged_batch_asks_for_nothing() {
    let (mut planner, mut staging) = fresh();
    let batch = Batch::new(&[0, 1, 3], Lengths::Exact(&[90, 80]), true, None).unwrap();
    let later = Batch::new(&[0, 1, 3], Lengths::Exact(&[91, 82]), true, None).unwrap();
    assert_eq!(planner.decide(&batch, false, false).unwrap().action, Action::Copy);
    planner.write(&mut staging).unwrap();
    planner.commit().unwrap();
    assert_eq!(
        planner.decide(&later, false, false).unwrap().action,
        Action::Nothing
    );
    assert_eq!(
        planner.decide(&later, false, true).unwrap().action,
        Action::Copy,
        "forced"
    );
}

/// A planner that holds nothing yet, and a staging area for its plans.
fn fresh() -> (StepPlanner, Vec<i32>) {
    let config = config(5, 1, None, Policy::Aiter);
    let staging = vec![0; config.classes[3].words];
    (StepPlanner::new(config).unwrap(), staging)
}

/// Makes the planner hold the plan of a batch whose lengths are known.
fn hold(planner: &mut StepPlanner, staging: &mut [i32], batch: &Batch<'_>) {
    assert_eq!(planner.decide(batch, false, false).unwrap().action, Action::Copy);
    planner.write(staging).unwrap();
    planner.commit().unwrap();
}

#[test]
fn keys_are_stored_last() {
    let (mut planner, mut staging) = fresh();
    let batch = Batch::new(&[0, 1], Lengths::Exact(&[90]), true, None).unwrap();
    planner.decide(&batch, false, false).unwrap();
    assert!(planner.commit().is_err(), "nothing was written");
    planner.write(&mut staging).unwrap();
    // The copy failed: no commit. The next step must not believe in it.
    assert_eq!(planner.decide(&batch, false, false).unwrap().action, Action::Copy);
}

#[test]
fn a_copy_that_failed_half_way_leaves_nothing_held() {
    let (mut planner, mut staging) = fresh();
    let held = Batch::new(&[0, 1], Lengths::Exact(&[90]), true, None).unwrap();
    let other = Batch::new(&[0, 2], Lengths::Exact(&[90]), true, None).unwrap();
    hold(&mut planner, &mut staging, &held);
    planner.decide(&other, false, false).unwrap();
    planner.write(&mut staging).unwrap();
    assert_eq!(planner.decide(&held, false, false).unwrap().action, Action::Copy);
}

#[test]
fn a_plan_that_is_withdrawn_leaves_the_old_one_held() {
    let (mut planner, mut staging) = fresh();
    let held = Batch::new(&[0, 1], Lengths::Exact(&[90]), true, None).unwrap();
    let other = Batch::new(&[0, 2], Lengths::Exact(&[90]), true, None).unwrap();
    planner.decide(&held, false, false).unwrap();
    planner.write(&mut staging).unwrap();
    planner.withdraw();
    assert!(planner.commit().is_err(), "it was withdrawn");
    assert_eq!(planner.decide(&held, false, false).unwrap().action, Action::Copy);
    planner.write(&mut staging).unwrap();
    planner.commit().unwrap();
    planner.withdraw();
    for writes in 0..3 {
        let decision = planner.decide(&other, true, false).unwrap();
        assert_eq!(decision.action, Action::Copy);
        for _ in 0..writes {
            planner.write(&mut staging).unwrap();
        }
        if writes == 2 {
            planner.launch_instead(decision, true).unwrap();
        }
        planner.withdraw();
        let again = planner.decide(&held, false, false).unwrap();
        assert_eq!(again.action, Action::Nothing, "after {writes} writes");
    }
}

#[test]
fn a_launch_without_device_arrays_changes_nothing() {
    let (mut planner, mut staging) = fresh();
    let held = Batch::new(&[0, 1], Lengths::Exact(&[90]), true, None).unwrap();
    hold(&mut planner, &mut staging, &held);
    let unknown = Batch::new(&[0, 1], Lengths::Unknown, true, None).unwrap();
    assert!(matches!(
        planner.decide(&unknown, false, false),
        Err(PlanError::State { .. })
    ));
    assert_eq!(
        planner.decide(&held, false, false).unwrap().action,
        Action::Nothing
    );
    assert_eq!(
        planner.decide(&unknown, true, false).unwrap().action,
        Action::Launch
    );
    assert_eq!(planner.decide(&held, false, false).unwrap().action, Action::Copy);
}

#[test]
fn balanced_plans_take_the_budget_of_their_longest_row() {
    let table = CostTable::BF16_HEADS_16;
    let mut config = config(40, 1, None, Policy::Balanced(table));
    config.topk = 2048;
    config.classes.truncate(2);
    let mut planner = StepPlanner::new(config.clone()).unwrap();
    let mut staging = vec![0; config.classes[1].words];
    for length in [2048, 2048, 300, 17, 16, 1, 2048] {
        let lengths = [length, 1];
        let batch = Batch::new(&[0, 1, 2], Lengths::Exact(&lengths), true, None).unwrap();
        planner.decide(&batch, false, true).unwrap();
        let written = planner.write(&mut staging).unwrap();
        assert_eq!(
            written.split_budget,
            split_budget(length, &table, 40).unwrap(),
            "{length}"
        );
        planner.commit().unwrap();
    }
}

#[test]
fn settings_that_cannot_work_are_named() {
    let refused = |change: fn(&mut StepConfig)| {
        let mut config = config(5, 1, None, Policy::Aiter);
        change(&mut config);
        StepPlanner::new(config).unwrap_err().to_string()
    };
    assert!(refused(|c| c.topk = 0).starts_with("topk is 0"));
    assert!(refused(|c| c.num_cus = 0).starts_with("num_cus is 0"));
    assert!(refused(|c| c.fold = 0).starts_with("fold is 0"));
    assert!(refused(|c| c.split_budget = Some(0)).starts_with("max_split_per_batch is 0"));
    assert!(refused(|c| c.min_tokens_per_split = 0).starts_with("min_tokens_per_split is 0"));
    assert!(refused(|c| c.classes.clear()).starts_with("classes has 0 entries"));
    assert!(refused(|c| c.classes.reverse()).starts_with("classes[1] is 9"));
    assert!(refused(|c| c.classes[1].words = 9).starts_with("layout words of classes[1]"));
    let table = CostTable {
        block: 0,
        ..CostTable::AITER
    };
    let named = |policy| {
        let mut config = config(5, 1, None, Policy::Aiter);
        config.policy = policy;
        StepPlanner::new(config).unwrap_err().to_string()
    };
    assert!(named(Policy::Balanced(table)).starts_with("block is 0"));
    let invariant = |piece_tokens| Policy::Invariant {
        table: CostTable::AITER,
        piece_tokens,
    };
    assert!(named(invariant(0)).starts_with("piece_tokens is 0"));
    // Pieces of one token need more room than the layouts of the other policies have.
    assert!(named(invariant(1)).starts_with("layout words of classes[0]"));
}

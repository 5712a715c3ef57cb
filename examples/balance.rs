//! How much shorter the balanced schedule's longest slot is than aiter's, and how near it is to the bound. Modelled by the
//! kernels' cost tables, not timed. Prints markdown.

#![expect(clippy::print_stdout, reason = "its output is what it is for")]

use mlaplan::PlanError;
use mlaplan::schedule::quality::Quality;
use mlaplan::schedule::{CostTable, EmptyRows, Policy, ScheduleParams, Variant, schedule};
use mlaplan::split::split_budget;

const ROWS: [usize; 8] = [1, 4, 16, 64, 128, 256, 512, 1024];
const TOPK: i32 = 2048;
const PIECE_TOKENS: i32 = 256;

/// A kernel as the table names it, its costs, and the compute units of its GPU.
const KERNELS: [(&str, CostTable, usize); 6] = [
    ("bf16 16 heads", CostTable::BF16_HEADS_16, 304),
    ("bf16 q, fp8 kv, 16 heads", CostTable::BF16_FP8_HEADS_16, 304),
    ("gfx942 fp8 16 heads", CostTable::GFX942_FP8_HEADS_16, 304),
    ("gfx942 fp8 64 heads", CostTable::GFX942_FP8_HEADS_64, 304),
    ("gfx942 fp8 128 heads", CostTable::GFX942_FP8_HEADS_128, 304),
    ("gfx950 bf16 64 heads", CostTable::GFX950_BF16_HEADS_64, 256),
];

/// Running sum of `rows` row lengths: all full, or between one token and full by a fixed pseudo-random sequence.
fn kv_indptr(rows: usize, is_full: bool) -> Vec<i32> {
    let mut seed = 42_u32;
    let mut indptr = vec![0];
    for _ in 0..rows {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let random = 1 + (seed >> 21).cast_signed(); // 11 bits
        let length = if is_full { TOPK } else { random };
        indptr.push(indptr[indptr.len() - 1] + length);
    }
    indptr
}

fn quality(
    indptr: &[i32],
    table: &CostTable,
    num_cus: usize,
    budget: i32,
    policy: Policy,
) -> Result<Quality, PlanError> {
    let params = ScheduleParams {
        num_cus,
        max_split_per_batch: budget,
        fold: 1,
        variant: Variant::Parallel,
        empty_rows: EmptyRows::Skip,
        policy,
    };
    Ok(schedule(indptr, &params)?.quality(table))
}

/// Longest slots against each other, as a ratio of whole numbers.
#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn over(one: u64, other: u64) -> f64 {
    one as f64 / other as f64
}

/// Furthest from the bound from 128 rows on, full and mixed, with budget 16 and with that of the table.
fn furthest(table: &CostTable, num_cus: usize) -> Result<[f64; 2], PlanError> {
    let mut worst = [1.0_f64; 2];
    for rows in ROWS.into_iter().filter(|&rows| rows >= 128) {
        for (worst, is_full) in worst.iter_mut().zip([true, false]) {
            let indptr = kv_indptr(rows, is_full);
            for budget in [16, split_budget(TOPK, table, num_cus)?] {
                let made = quality(&indptr, table, num_cus, budget, Policy::Balanced(*table))?;
                *worst = worst.max(made.ratio());
            }
        }
    }
    Ok(worst)
}

fn print_table(table: &CostTable, num_cus: usize) -> Result<(), PlanError> {
    println!(
        "| rows | | aiter | balanced | gain | over the bound | budget by costs | with it | over the bound | invariant, {PIECE_TOKENS} tokens |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for rows in ROWS {
        for (kind, is_full) in [("full", true), ("mixed", false)] {
            let indptr = kv_indptr(rows, is_full);
            let longest = indptr.windows(2).map(|row| row[1] - row[0]).max().unwrap_or(0);
            let chosen = split_budget(longest, table, num_cus)?;
            let ask = |budget, policy| quality(&indptr, table, num_cus, budget, policy);
            let aiter = ask(16, Policy::Aiter)?;
            let balanced = ask(16, Policy::Balanced(*table))?;
            let by_costs = ask(chosen, Policy::Balanced(*table))?;
            let piece_tokens = PIECE_TOKENS;
            let invariant = ask(
                16,
                Policy::Invariant {
                    table: *table,
                    piece_tokens,
                },
            )?;
            println!(
                "| {rows} | {kind} | {} | {} | {:.3} | {:.3} | {chosen} | {} | {:.3} | {} |",
                aiter.finish_time / 10,
                balanced.finish_time / 10,
                over(aiter.finish_time, balanced.finish_time),
                balanced.ratio(),
                by_costs.finish_time / 10,
                by_costs.ratio(),
                invariant.finish_time / 10,
            );
        }
    }
    println!();
    Ok(())
}

fn main() -> Result<(), PlanError> {
    println!("# The balanced schedule, modelled\n");
    println!(
        "Longest slot in instructions of a wave, by the kernels' cost tables (counted in an emulator, `src/schedule/cost.rs`).\n\
         **Modelled, not timed.** Made by `make model-balanced`.\n\n\
         aiter and balanced use the same slots: budget 16. Beside it the budget that the cost table chooses for the longest row, where\n\
         the merge, which is assumed, counts. The bound is that of `schedule::quality::lower_bound`, for the slots that the budget allows: no\n\
         schedule of any kind can finish earlier. Full rows have {TOPK} tokens, mixed ones 1 to {TOPK} of a fixed pseudo-random sequence.\n"
    );
    for (name, table, num_cus) in KERNELS {
        println!("## {name}, {num_cus} CUs\n");
        print_table(&table, num_cus)?;
    }
    println!("## Furthest from the bound, 128 rows and more\n");
    println!("| kernel | CUs | full | mixed |\n| --- | --- | --- | --- |");
    for (name, table, _) in KERNELS {
        for num_cus in [304, 256] {
            let [full, mixed] = furthest(&table, num_cus)?;
            println!("| {name} | {num_cus} | {full:.3} | {mixed:.3} |");
        }
    }
    Ok(())
}

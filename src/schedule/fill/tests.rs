//! The fill's loops against its definition.

use super::super::random::Random;
use super::super::{CostTable, definition};
use super::*;

/// Works, and where the slots and the partials begin; entries behind them keep a mark.
type Arrays = [Vec<i32>; 3];

fn written(
    tiles: usize,
    slots: usize,
    by: impl FnOnce(&mut [i32], Writer) -> (usize, usize),
) -> (Arrays, (usize, usize)) {
    let mut arrays = [
        vec![-7; (tiles + slots) * WORK_WORDS],
        vec![-7; slots + 3],
        vec![-7; tiles + 3],
    ];
    let [work_info, work_indptr, reduce_indptr] = &mut arrays;
    let counts = by(reduce_indptr, Writer::new(work_indptr, work_info));
    (arrays, counts)
}

/// The works of the definition as slot, tile, first and last position, and the slots.
fn defined(lengths: &[i64], capacity: u64, prices: &Prices) -> (Vec<[i64; 4]>, usize) {
    let tokens = i128::from(prices.block_tokens());
    let lengths: Vec<i128> = lengths.iter().map(|&length| length.into()).collect();
    let blocks: Vec<i128> = lengths
        .iter()
        .map(|length| length.div_euclid(tokens) + i128::from(length % tokens > 0))
        .collect();
    let works = definition::fill(&blocks, capacity.into(), i128::MAX, prices).unwrap();
    let slots = works.last().map_or(1, |work| work[0] + 1);
    let in_tokens = |[slot, tile, first, last]: definition::Work| {
        let length = lengths[usize::try_from(tile).unwrap()];
        [slot, tile, first * tokens, length.min(last * tokens)].map(|n| i64::try_from(n).unwrap())
    };
    (
        works.into_iter().map(in_tokens).collect(),
        usize::try_from(slots).unwrap(),
    )
}

/// A table, the lengths of the rows, and a capacity from a slot per block to one slot for everything.
fn random_case(below: &mut impl FnMut(u64) -> u64) -> (CostTable, Vec<i64>, u64) {
    let (power, longest_power) = (below(20), below(14));
    let block = 1 + below(1 << power);
    let scale = [1, 2, 8, 40][usize::try_from(below(4)).unwrap()] * block;
    let whole = below(scale);
    let piece = below(scale).min(whole + block);
    let tokens = [1, 3, 16, 64][usize::try_from(below(4)).unwrap()];
    let table = CostTable {
        block_tokens: tokens,
        block: u32::try_from(block).unwrap(),
        piece: u32::try_from(piece).unwrap(),
        whole: u32::try_from(whole).unwrap(),
        ..CostTable::AITER
    };
    let longest = 1 + below(1 << longest_power);
    let lengths = (0..=below(80))
        .map(|_| i64::try_from(below(longest + 1)).unwrap())
        .collect();
    let blocks = longest.div_ceil(tokens.into()) * (1 + below(4));
    let capacity = piece.max(whole) + block * (1 + below(1 + blocks)) + below(block);
    (table, lengths, capacity)
}

/// Compares every word with what follows from the works of the definition, for tiles of these bounds.
fn compare(made: &(Arrays, (usize, usize)), works: &[[i64; 4]], bounds: &[[i64; 2]], context: &str) {
    let ([work_info, work_indptr, reduce_indptr], (num_works, num_partials)) = made;
    assert_eq!(*num_works, works.len(), "{context}");
    let pieces = |tile: i64| works.iter().filter(|work| work[1] == tile).count();
    let mut partials = 0;
    for (number, (&[slot, tile, from, to], words)) in
        works.iter().zip(work_info.chunks(WORK_WORDS)).enumerate()
    {
        let [start, end] = bounds[usize::try_from(tile).unwrap()];
        let is_cut = pieces(tile) > 1;
        let place = if is_cut { partials } else { -1 };
        let wanted = [
            tile,
            place,
            tile,
            tile + 1,
            start + from,
            start + to,
            end - start - to,
            0,
        ];
        assert_eq!(
            words.iter().map(|&word| i64::from(word)).collect::<Vec<_>>(),
            wanted,
            "{context}"
        );
        partials += i64::from(is_cut);
        let slot = usize::try_from(slot).unwrap();
        let own =
            usize::try_from(work_indptr[slot]).unwrap()..usize::try_from(work_indptr[slot + 1]).unwrap();
        assert!(own.contains(&number), "work {number} in slot {slot}: {context}");
    }
    assert_eq!(partials, i64::try_from(*num_partials).unwrap(), "{context}");
    let mut ends = vec![0];
    for tile in 0..i64::try_from(bounds.len()).unwrap() {
        let count = pieces(tile);
        ends.push(ends[ends.len() - 1] + if count > 1 { count } else { 0 });
    }
    ends.resize(reduce_indptr.len(), *num_partials);
    assert!(
        reduce_indptr
            .iter()
            .map(|&end| usize::try_from(end).unwrap())
            .eq(ends),
        "{context}"
    );
    assert!(
        work_info[num_works * WORK_WORDS..].iter().all(|&word| word == -7),
        "{context}"
    );
}

#[test]
fn every_loop_writes_the_works_of_the_definition() {
    let mut random = Random(5);
    let mut below = |end| random.below(end);
    for case in 0..4000 {
        let (table, lengths, capacity) = random_case(&mut below);
        let mut kv_indptr = vec![i32::try_from(below(50)).unwrap()];
        for length in &lengths {
            kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + i32::try_from(*length).unwrap());
        }
        let prices = Prices::of(&table);
        let rules = Rules::new(capacity, &prices);
        for fold in [1, 1 + case % 4] {
            let repeat = |n: &i64| std::iter::repeat_n(*n, fold);
            let tiles: Vec<i64> = lengths.iter().flat_map(repeat).collect();
            let mut bounds = vec![];
            let mut end = 0;
            for length in &lengths {
                end += length;
                bounds.extend(std::iter::repeat_n([end - length, end], fold));
            }
            let (works, slots) = defined(&tiles, capacity, &prices);
            let context = format!("case {case}, fold {fold}: {table:?} {capacity} {lengths:?}");
            let folded = written(tiles.len(), slots, |reduce, writer| {
                place_all(&kv_indptr, fold, reduce, || Fill::new(&rules, writer))
            });
            compare(&folded, &works, &bounds, &context);
            if fold == 1 {
                let in_runs = written(tiles.len(), slots, |reduce, writer| {
                    fill_in_runs(&rules, &kv_indptr, reduce, writer)
                });
                assert_eq!(in_runs, folded, "{context}");
            }
        }
    }
}

/// Fills one slot with rows of so many blocks of 16 tokens, two that are empty before them.
fn fill_one_slot(blocks: i32) {
    let prices = Prices::of(&CostTable::AITER);
    let capacity = prices.whole + 100 * prices.block;
    let (mut work_info, mut work_indptr, mut reduce_indptr) = ([0; 4 * WORK_WORDS], [0; 2], [0; 4]);
    let writer = Writer::new(&mut work_indptr, &mut work_info);
    write_fill(
        &[0, 0, 0, 16 * blocks],
        1,
        &mut reduce_indptr,
        writer,
        capacity,
        &prices,
    );
}

#[test]
fn the_last_slot_may_be_full() {
    fill_one_slot(100);
}

#[test]
#[should_panic(expected = "not feasible")]
fn a_capacity_that_is_too_small_by_one_slot_is_not_passed_over() {
    fill_one_slot(101);
}

#[test]
#[should_panic(expected = "not feasible")]
fn a_capacity_that_is_far_too_small_is_not_passed_over() {
    fill_one_slot(2000);
}

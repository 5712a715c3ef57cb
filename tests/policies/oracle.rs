//! The policies from their definitions in `docs/design.md`, slowly: every candidate is tried, in numbers of 128 bits.

use mlaplan::schedule::{CostTable, EmptyRows, Policy, Schedule, ScheduleParams, WORK_WORDS, schedule};

/// A work of the oracle: slot, tile, first and last position in the row, whether it is the whole row.
pub(crate) type Work = (i128, usize, i128, i128, bool);

/// The table's letters, as the definition has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Letters {
    t: i128,
    b: i128,
    p: i128,
    w: i128,
}

impl Letters {
    fn of(table: &CostTable) -> Self {
        Self {
            t: table.block_tokens.into(),
            b: table.block.into(),
            p: table.piece.into(),
            w: table.whole.into(),
        }
    }

    /// Blocks of `length` tokens.
    fn n(&self, length: i128) -> i128 {
        (length + self.t - 1).div_euclid(self.t)
    }
}

/// Row lengths of the tiles, in order, empty ones included.
pub(crate) fn tiles(lengths: &[i32], fold: usize) -> Vec<i128> {
    lengths
        .iter()
        .flat_map(|&length| std::iter::repeat_n(i128::from(length), fold))
        .collect()
}

/// The fill under `x`, and the slots that it takes; `None` where a tile fits no slot.
pub(crate) fn fill(tiles: &[i128], x: i128, letters: &Letters) -> Option<(Vec<Work>, i128)> {
    let Letters { t, b, p, w } = *letters;
    let (mut slot, mut room) = (0, x);
    let mut works = Vec::new();
    for (tile, &length) in tiles.iter().enumerate() {
        let n = letters.n(length);
        if n == 0 {
            continue;
        }
        if w + n * b <= room {
            works.push((slot, tile, 0, length, true));
            room -= w + n * b;
            continue;
        }
        let head = (n - 1).min((room - p).div_euclid(b)).max(0);
        if head == 0 && w + n * b <= x {
            slot += 1;
            works.push((slot, tile, 0, length, true));
            room = x - w - n * b;
            continue;
        }
        let mut done = head;
        if head > 0 {
            works.push((slot, tile, 0, head * t, false));
        }
        let most = (n - 1).min((x - p).div_euclid(b));
        if most < 1 {
            return None;
        }
        while done < n {
            let taken = most.min(n - done);
            slot += 1;
            works.push((slot, tile, done * t, ((done + taken) * t).min(length), false));
            room = x - p - taken * b;
            done += taken;
        }
    }
    Some((works, slot + 1))
}

/// Slots that the budget allows.
pub(crate) fn slots(tiles: &[i128], params: &ScheduleParams) -> i128 {
    let live = i128::try_from(tiles.iter().filter(|&&length| length > 0).count()).unwrap();
    let num_cus = i128::try_from(params.num_cus).unwrap();
    match params.max_split_per_batch {
        -1 => num_cus,
        budget => num_cus.min(i128::from(budget) * live),
    }
}

/// Candidates for the capacity.
pub(crate) fn candidates(tiles: &[i128], s: i128, letters: &Letters) -> [i128; 64] {
    let Letters { b, p, w, .. } = *letters;
    let live = tiles.iter().filter(|&&length| length > 0);
    let sum: i128 = live.map(|&length| w + letters.n(length) * b).sum();
    let low = ((sum + s - 1) / s).max(p + b);
    let high = low + w.max(2 * p) + b + (p - w).max(0);
    let step = ((high - low + 62) / 63).max(1);
    std::array::from_fn(|j| low + i128::try_from(j).unwrap() * step)
}

/// aiter's schedule of the rows, and its longest slot without the cost of a slot.
pub(crate) fn aiter(kv_indptr: &[i32], params: &ScheduleParams, table: &CostTable) -> (Vec<Work>, i128) {
    let params = ScheduleParams {
        empty_rows: EmptyRows::Skip,
        policy: Policy::Aiter,
        ..*params
    };
    let made = schedule(kv_indptr, &params).unwrap();
    let quality = made.quality(&CostTable { slot: 0, ..*table });
    (works_of(&made), quality.finish_time.into())
}

/// The balanced schedule by a scan of every candidate, and whether it is a fill.
pub(crate) fn balanced(kv_indptr: &[i32], params: &ScheduleParams, table: &CostTable) -> (Vec<Work>, bool) {
    let Some(choice) = choice(kv_indptr, params, table) else {
        return (vec![], false);
    };
    let c = i128::from(table.cut);
    let whole = choice.whole.filter(|(_, u)| *u < choice.x + c);
    let least = whole.as_ref().map_or(choice.x + c, |(_, u)| *u);
    if choice.f + if choice.is_cut { c } else { 0 } < least {
        (choice.walk, false)
    } else {
        (whole.map_or(choice.fill, |(works, _)| works), true)
    }
}

/// What `balanced` chooses from, in the definition's letters.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) fill: Vec<Work>,
    pub(crate) x: i128,
    /// Whole tiles, as many in every slot, and what that many cost; where all tiles have as many blocks.
    pub(crate) whole: Option<(Vec<Work>, i128)>,
    pub(crate) walk: Vec<Work>,
    pub(crate) f: i128,
    /// Whether the walk cuts a tile.
    pub(crate) is_cut: bool,
}

/// `None` where no tile is live.
pub(crate) fn choice(kv_indptr: &[i32], params: &ScheduleParams, table: &CostTable) -> Option<Choice> {
    let letters = Letters::of(table);
    let tiles = tiles(&lengths_of(kv_indptr), params.fold);
    let s = slots(&tiles, params);
    if tiles.iter().all(|&length| length == 0) {
        return None;
    }
    let candidates = candidates(&tiles, s, &letters);
    let feasible: Vec<bool> = candidates
        .iter()
        .map(|&x| fill(&tiles, x, &letters).is_some_and(|(_, needed)| needed <= s))
        .collect();
    assert!(feasible.is_sorted(), "what is feasible stays so: {feasible:?}");
    assert!(feasible[63], "the largest candidate is feasible");
    let least = feasible.iter().position(|&is_feasible| is_feasible).unwrap();
    let (walk, f) = aiter(kv_indptr, params, table);
    Some(Choice {
        fill: fill(&tiles, candidates[least], &letters).unwrap().0,
        x: candidates[least],
        whole: whole_tiles(&tiles, s, &letters),
        is_cut: is_cut(&walk),
        walk,
        f,
    })
}

/// As many whole tiles in every slot but the last ones, and what those of a slot cost.
fn whole_tiles(tiles: &[i128], s: i128, letters: &Letters) -> Option<(Vec<Work>, i128)> {
    let live: Vec<(usize, i128)> = tiles
        .iter()
        .copied()
        .enumerate()
        .filter(|&(_, length)| length > 0)
        .collect();
    let n = letters.n(live[0].1);
    if live.iter().any(|&(_, length)| letters.n(length) != n) {
        return None;
    }
    let each = (i128::try_from(live.len()).unwrap() + s - 1) / s;
    let works = (0..)
        .zip(&live)
        .map(|(rank, &(tile, length)): (i128, _)| (rank / each, tile, 0, length, true));
    Some((works.collect(), each * (letters.w + n * letters.b)))
}

/// Whether any work is a piece.
pub(crate) fn is_cut(works: &[Work]) -> bool {
    works.iter().any(|work| !work.4)
}

/// The invariant schedule, slot by slot from the definition.
pub(crate) fn invariant(kv_indptr: &[i32], params: &ScheduleParams, table: &CostTable, g: i32) -> Vec<Work> {
    let letters = Letters::of(table);
    let g = i128::from(g);
    let num_cus = i128::try_from(params.num_cus).unwrap();
    let mut works = Vec::new();
    let mut costs = Vec::new();
    for (tile, length) in tiles(&lengths_of(kv_indptr), params.fold).into_iter().enumerate() {
        let pieces = (length + g - 1) / g;
        for piece in 0..pieces {
            let (from, to) = (piece * g, ((piece + 1) * g).min(length));
            let fixed = if pieces == 1 { letters.w } else { letters.p };
            works.push((0, tile, from, to, pieces == 1));
            costs.push(fixed + letters.n(to - from) * letters.b);
        }
    }
    let total: i128 = costs.iter().sum();
    let mut before = 0;
    for (work, cost) in works.iter_mut().zip(costs) {
        work.0 = before * num_cus / total;
        before += cost;
    }
    works
}

pub(crate) fn lengths_of(kv_indptr: &[i32]) -> Vec<i32> {
    kv_indptr.windows(2).map(|bounds| bounds[1] - bounds[0]).collect()
}

/// A schedule's works in the oracle's form, its partial locations checked.
pub(crate) fn works_of(made: &Schedule) -> Vec<Work> {
    let mut starts = vec![0];
    for length in &made.row_lengths {
        starts.push(starts.last().unwrap() + i128::from(*length));
    }
    let works = made.work_info.as_chunks::<WORK_WORDS>().0;
    let mut found = Vec::new();
    for (slot, bounds) in (0..).zip(made.work_indptr.windows(2)) {
        for work in &works[usize::try_from(bounds[0]).unwrap()..usize::try_from(bounds[1]).unwrap()] {
            let tile = usize::try_from(work[0]).unwrap();
            let start = starts[tile / made.params.fold];
            let span = (i128::from(work[4]) - start, i128::from(work[5]) - start);
            found.push((slot, tile, span.0, span.1, work[1] == -1));
        }
    }
    found
}

//! Where the works of a policy go.

use super::WORK_WORDS;

/// A policy, placing the tiles one after the other.
pub(super) trait Placer {
    /// Places a tile that is not empty.
    fn place(&mut self, tile: i32, start: i32, end: i32);
    /// Passes a tile of length 0.
    fn place_empty(&mut self, _tile: i32, _position: i32) {}
    /// Partials so far.
    fn num_partials(&self) -> i32;
    /// The numbers of works and partials when all tiles are placed.
    fn finish(self) -> (usize, usize);
}

/// Places every tile and writes where the partials of each end; returns the numbers of works and partials.
///
/// One loop per policy, with all of the placer in it: what it carries from tile to tile then stays in registers. Each step waits
/// for the one before, and a detour by memory would be most of its time.
#[inline(never)]
pub(super) fn place_all<P: Placer>(
    kv_indptr: &[i32],
    fold: usize,
    reduce_indptr: &mut [i32],
    placer: impl FnOnce() -> P,
) -> (usize, usize) {
    let mut placer = placer();
    reduce_indptr[0] = 0;
    let tiles = (kv_indptr.len() - 1) * fold;
    let (live, behind) = reduce_indptr[1..].split_at_mut(tiles);
    let mut reduce_ends = live.iter_mut();
    let mut tile = 0;
    let origin = kv_indptr[0];
    for (&start, &end) in kv_indptr.iter().zip(&kv_indptr[1..]) {
        let (start, end) = (start - origin, end - origin);
        for reduce_end in reduce_ends.by_ref().take(fold) {
            if start < end {
                placer.place(tile, start, end);
            } else {
                placer.place_empty(tile, start);
            }
            *reduce_end = placer.num_partials();
            tile += 1;
        }
    }
    behind.fill(placer.num_partials());
    placer.finish()
}

/// Writes works into the arrays.
#[derive(Debug)]
pub(super) struct Writer<'a> {
    pub(super) work_indptr: &'a mut [i32],
    pub(super) work_info: &'a mut [[i32; WORK_WORDS]],
    /// The open slot.
    slot: usize,
    num_works: usize,
    num_partials: i32,
}

impl<'a> Writer<'a> {
    pub(super) fn new(work_indptr: &'a mut [i32], work_info: &'a mut [i32]) -> Self {
        work_indptr[0] = 0;
        Self {
            work_indptr,
            work_info: work_info.as_chunks_mut().0,
            slot: 0,
            num_works: 0,
            num_partials: 0,
        }
    }

    #[inline]
    fn push(&mut self, work: [i32; WORK_WORDS]) {
        self.work_info[self.num_works] = work;
        self.num_works += 1;
    }

    #[inline]
    pub(super) fn num_partials(&self) -> i32 {
        self.num_partials
    }

    /// A whole row.
    #[inline]
    pub(super) fn whole(&mut self, tile: i32, start: i32, end: i32) {
        self.push([tile, -1, tile, tile + 1, start, end, 0, 0]);
    }

    /// Positions `from .. to` of a row that is cut and that ends at `end`.
    #[inline]
    pub(super) fn piece(&mut self, tile: i32, from: i32, to: i32, end: i32) {
        self.push([tile, self.num_partials, tile, tile + 1, from, to, end - to, 0]);
        self.num_partials += 1;
    }

    /// The works that follow are the next slot's.
    #[inline]
    pub(super) fn open_slot(&mut self) {
        self.slot += 1;
        self.work_indptr[self.slot] = narrow(self.num_works);
    }

    /// Ends the last slot and leaves the ones behind it empty; returns the numbers of works and partials.
    pub(super) fn finish(self) -> (usize, usize) {
        self.work_indptr[self.slot + 1..].fill(narrow(self.num_works));
        (self.num_works, usize::try_from(self.num_partials).unwrap_or(0))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "the number of works was checked to fit before the walk"
)]
#[inline]
pub(super) fn narrow(num_works: usize) -> i32 {
    num_works as i32
}

//! The fill of `balanced` by its definition, for tests.

use super::prices::Prices;

/// A work: its slot and tile, and the blocks of the tile from the first one to that behind the last.
pub(super) type Work = [i128; 4];

/// The works of tiles of so many blocks under a capacity, `None` where they take more slots than there are.
pub(super) fn fill(tiles: &[i128], capacity: i128, slots: i128, prices: &Prices) -> Option<Vec<Work>> {
    let [block, piece, whole] = [prices.block, prices.piece, prices.whole].map(i128::from);
    let (mut works, mut slot, mut room) = (vec![], 0, capacity);
    for (tile, &blocks) in (0..).zip(tiles) {
        let mut done = 0;
        while done < blocks {
            if done == 0 && whole + blocks * block <= room {
                works.push([slot, tile, 0, blocks]);
                room -= whole + blocks * block;
                break;
            }
            // A tile that is cut has two pieces at least.
            let most = if done == 0 { blocks - 1 } else { blocks - done };
            let taken = most.min((room - piece).div_euclid(block)).max(0);
            if taken > 0 {
                works.push([slot, tile, done, done + taken]);
                room -= piece + taken * block;
                done += taken;
            }
            if done < blocks {
                (slot, room) = (slot + 1, capacity);
                if slot == slots {
                    return None;
                }
            }
        }
    }
    Some(works)
}

//! A small sample of a large product in which every pair of properties occurs.

use std::collections::BTreeSet;

/// One level of one factor: `(factor, level)`.
pub(super) type Spot = (usize, usize);

/// Rows over factors of which factor `i` has `levels[i]` levels, chosen so that every two levels of
/// different factors that may stand together do so in at least one row.
///
/// `may` says whether two spots may stand in one row. Each level must have a companion in every
/// other factor, whatever else is in the row. The same arguments give the same rows everywhere,
/// which is what lets ranks agree on them without a word.
pub(super) fn pairwise(levels: &[usize], may: impl Fn(Spot, Spot) -> bool) -> Vec<Vec<usize>> {
    let mut open = pairs(levels, &may);
    let mut rows = Vec::new();
    while let Some(&first) = open.first() {
        let row = best_row(levels, &may, &open, first, rows.len());
        for (i, &a) in row.iter().enumerate() {
            for (j, &b) in row.iter().enumerate().skip(i + 1) {
                open.remove(&((i, a), (j, b)));
            }
        }
        rows.push(row);
    }
    rows
}

/// All pairs that must occur, the lower factor first.
fn pairs(levels: &[usize], may: &impl Fn(Spot, Spot) -> bool) -> BTreeSet<(Spot, Spot)> {
    let spots = |i: usize| (0..levels[i]).map(move |level| (i, level));
    let factors = 0..levels.len();
    let of_two = factors
        .clone()
        .flat_map(|i| factors.clone().skip(i + 1).map(move |j| (i, j)));
    of_two
        .flat_map(|(i, j)| spots(i).flat_map(move |a| spots(j).map(move |b| (a, b))))
        .filter(|&(a, b)| may(a, b))
        .collect()
}

/// The row that holds `first` and, chosen one factor at a time, as many other open pairs as it can.
fn best_row(
    levels: &[usize],
    may: &impl Fn(Spot, Spot) -> bool,
    open: &BTreeSet<(Spot, Spot)>,
    first: (Spot, Spot),
    number: usize,
) -> Vec<usize> {
    let mut chosen: Vec<Spot> = vec![first.0, first.1];
    for (factor, &count) in levels.iter().enumerate() {
        if chosen.iter().any(|spot| spot.0 == factor) {
            continue;
        }
        // Where several are as good, neighbouring rows begin elsewhere.
        let turned = (0..count).map(|level| (level + number) % count);
        let fitting = turned.filter(|&level| chosen.iter().all(|&spot| may(spot, (factor, level))));
        let gain = |level: usize| {
            let is_open = |&&spot: &&Spot| {
                let own = (factor, level);
                open.contains(&(spot.min(own), spot.max(own)))
            };
            chosen.iter().filter(is_open).count()
        };
        let best = fitting.rev().max_by_key(|&level| gain(level));
        chosen.push((factor, best.expect("every level has a companion")));
    }
    chosen.sort_unstable();
    chosen.into_iter().map(|(_, level)| level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anything(_: Spot, _: Spot) -> bool {
        true
    }

    /// The pairs that the rows lack, found the plain way.
    fn missing(levels: &[usize], may: fn(Spot, Spot) -> bool, rows: &[Vec<usize>]) -> usize {
        let occurs =
            |&((i, a), (j, b)): &(Spot, Spot)| rows.iter().any(|row| row[i] == a && row[j] == b);
        let mut lacking = 0;
        for i in 0..levels.len() {
            for j in i + 1..levels.len() {
                for pair in
                    (0..levels[i]).flat_map(|a| (0..levels[j]).map(move |b| ((i, a), (j, b))))
                {
                    lacking += usize::from(may(pair.0, pair.1) && !occurs(&pair));
                }
            }
        }
        lacking
    }

    #[test]
    fn every_pair_occurs_in_far_fewer_rows_than_the_product_has() {
        for levels in [
            &[11, 9, 20, 6, 3][..],
            &[11, 1, 20, 6, 3],
            &[2, 2, 2],
            &[1, 1],
            &[5, 4],
        ] {
            let rows = pairwise(levels, anything);
            assert_eq!(missing(levels, anything, &rows), 0, "{levels:?}");
            let mut sorted = levels.to_vec();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            let least = sorted[0] * sorted[1];
            assert!(
                rows.len() <= least + least / 4 + 2,
                "{levels:?}: {} rows",
                rows.len()
            );
        }
    }

    #[test]
    fn what_may_not_stand_together_never_does() {
        // Odd levels of the first factor stand with odd ones of the second only.
        let may = |a: Spot, b: Spot| a.0 + b.0 != 1 || a.1 % 2 == b.1 % 2;
        let levels = [6, 5, 4, 3];
        let rows = pairwise(&levels, may);
        assert_eq!(missing(&levels, may, &rows), 0);
        assert!(rows.iter().all(|row| row[0] % 2 == row[1] % 2));
    }

    #[test]
    fn the_rows_are_the_same_each_time() {
        assert_eq!(
            pairwise(&[7, 3, 5], anything),
            pairwise(&[7, 3, 5], anything)
        );
    }

    #[test]
    fn a_sample_that_lacks_a_pair_is_noticed() {
        let levels = [4, 3, 2];
        let mut rows = pairwise(&levels, anything);
        rows.pop();
        assert_ne!(missing(&levels, anything, &rows), 0);
    }
}

//! Figures from samples.

/// The value that a share `q` of the sorted samples does not exceed (nearest rank).
pub(crate) fn percentile(sorted: &[u64], q: f64) -> u64 {
    assert!(!sorted.is_empty(), "a percentile needs samples");
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "a median needs values");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// A median with the interval that holds it nineteen times out of twenty. Fewer than six values give
/// none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) median: f64,
    pub(crate) interval: Option<[f64; 2]>,
}

impl Estimate {
    /// From independent values, whatever their distribution: by the number of them on each side,
    /// which is as for the throws of a coin.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let last = count.checked_sub(1)?;
        // The most values that may be cut off on each side with a chance of at most 2.5 %.
        let (mut cut, mut chance, mut term) = (0, 0.0, 0.5f64.powi(count as i32));
        while cut < count / 2 && chance + term <= 0.025 {
            chance += term;
            term *= (count - cut) as f64 / (cut + 1) as f64;
            cut += 1;
        }
        let cut = cut.checked_sub(1);
        Some(Self {
            median: median(&sorted),
            interval: cut.map(|cut| [sorted[cut], sorted[last - cut]]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_at_the_nearest_rank() {
        let sorted: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&sorted, 0.5), 50);
        assert_eq!(percentile(&sorted, 0.99), 99);
        assert_eq!(percentile(&sorted, 1.0), 100);
        assert_eq!(percentile(&sorted, 0.0), 1);
        assert_eq!(percentile(&[7], 0.99), 7);
    }

    #[test]
    fn one_stall_among_few_samples_is_their_p99() {
        assert_eq!(percentile(&[1, 1, 1, 5_000], 0.99), 5_000);
    }

    #[test]
    fn intervals_are_those_of_the_sign_test() {
        let values = |count: u32| (1..=count).map(f64::from).collect::<Vec<_>>();
        let interval = |count| Estimate::of(&values(count)).map(|e| e.interval);
        // From tables: 15 values, the 4th and the 12th; 6 values, the first and the last.
        assert_eq!(interval(15), Some(Some([4.0, 12.0])));
        assert_eq!(interval(9), Some(Some([2.0, 8.0])));
        assert_eq!(interval(6), Some(Some([1.0, 6.0])));
        assert_eq!(interval(5), Some(None));
        assert_eq!(interval(1), Some(None));
        assert_eq!(interval(0), None);
    }

    #[test]
    fn medians_ignore_order_and_outliers() {
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 1e9, 2.0]), 3.0);
    }
}

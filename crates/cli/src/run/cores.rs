//! Which processors a rank gets, when every rank can have a core of its own.

use std::collections::BTreeMap;

use rustix::thread::{CpuSet, sched_getaffinity};

/// The processors that this process may use, by core: siblings of one core together, cores of one
/// package in a row.
pub(crate) fn available() -> Vec<Vec<usize>> {
    let Ok(allowed) = sched_getaffinity(None) else {
        return Vec::new();
    };
    let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    by_core(cpus, |cpu| {
        let read = |what: &str| -> Option<usize> {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{what}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        Some((read("physical_package_id")?, read("core_id")?))
    })
}

/// Groups processors by (package, core); one of which nothing is known is a core of its own.
fn by_core(
    cpus: impl Iterator<Item = usize>,
    place: impl Fn(usize) -> Option<(usize, usize)>,
) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for cpu in cpus {
        let place = place(cpu).unwrap_or((usize::MAX, cpu));
        cores.entry(place).or_default().push(cpu);
    }
    cores.into_values().collect()
}

/// The processors of each of `ranks` ranks: whole cores, the same number for all up to one.
/// `None` if there are fewer cores than ranks, or nothing to divide.
pub(super) fn divide(cores: &[Vec<usize>], ranks: usize) -> Option<Vec<Vec<usize>>> {
    if ranks < 2 || cores.len() < ranks {
        return None;
    }
    let bound = |rank: usize| rank * cores.len() / ranks;
    let shares = (0..ranks).map(|rank| cores[bound(rank)..bound(rank + 1)].concat());
    Some(shares.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_stay_together_and_packages_in_a_row() {
        // Two packages of two cores; a core's siblings are numbered four apart.
        let place = |cpu: usize| Some((cpu % 4 / 2, cpu % 2));
        let cores = by_core(0..8, place);
        assert_eq!(cores, [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(
            divide(&cores, 2).unwrap(),
            [vec![0, 4, 1, 5], vec![2, 6, 3, 7]]
        );
        assert_eq!(divide(&cores, 3).unwrap().len(), 3);
    }

    #[test]
    fn nobody_is_bound_when_ranks_do_not_fit_or_are_alone() {
        let cores = by_core(0..2, |_| None);
        assert_eq!(cores.len(), 2, "nothing is known of them");
        assert!(divide(&cores, 2).is_some());
        assert_eq!(divide(&cores, 3), None);
        assert_eq!(divide(&cores, 1), None);
    }

    #[test]
    fn this_machine_has_cores() {
        assert!(!available().is_empty());
    }
}

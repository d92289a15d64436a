//! Of the ranks that failed together, the one that the others failed because of.
//!
//! The order in which processes end says little: a rank that panics closes its connections while it
//! unwinds, and its peers may have seen that, complained and ended before it has. So failures are
//! collected for a moment, and judged by what is known of each.

use super::message::{End, RankFailure};

/// Signals that a process does not send itself because a peer is gone, as it may with SIGABRT.
const OWN_FAULT: [i32; 5] = [
    signal_hook::consts::SIGSEGV,
    signal_hook::consts::SIGBUS,
    signal_hook::consts::SIGILL,
    signal_hook::consts::SIGFPE,
    signal_hook::consts::SIGKILL,
];

/// Takes the culprit out of `failures`, which are in the order in which the ranks ended.
///
/// It is the first that was killed; otherwise the first that blames no other, if it is blamed
/// itself; otherwise the first.
pub(super) fn pick(mut failures: Vec<RankFailure>) -> Option<RankFailure> {
    let killed = |failure: &RankFailure| match failure.end {
        End::Signal(signal) => OWN_FAULT.contains(&signal),
        End::NotStarted { .. } => true,
        End::Code(_) => false,
    };
    let blamed: Vec<usize> = failures.iter().flat_map(blames).collect();
    let blamed =
        |failure: &RankFailure| blamed.contains(&failure.rank) && blames(failure).next().is_none();
    let index = failures
        .iter()
        .position(killed)
        .or_else(|| failures.iter().position(blamed))
        .unwrap_or(0);
    (index < failures.len()).then(|| failures.swap_remove(index))
}

/// Whether somebody blames this rank.
pub(super) fn is_blamed(rank: usize, by: &[RankFailure]) -> bool {
    by.iter().flat_map(blames).any(|blamed| blamed == rank)
}

/// The other ranks that a failure's last words name, as errors of process groups do:
/// `rank 0 of group "world": barrier #1: rank 2 is lost`, or `... (peer: rank 2)`.
fn blames(failure: &RankFailure) -> impl Iterator<Item = usize> {
    let named = failure.stderr.iter().flat_map(|line| {
        let (text, mark) = match line.split_once(" of group ") {
            Some((_, text)) => (text, "rank "),
            None => (line.as_str(), "(peer: rank "),
        };
        text.split(mark).skip(1).filter_map(|rest| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            digits.parse().ok()
        })
    });
    named.filter(|&rank| rank != failure.rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, end: End, stderr: &str) -> RankFailure {
        RankFailure {
            rank,
            attempt: 0,
            host: "h".into(),
            pid: 1,
            end,
            stderr: stderr.lines().map(str::to_owned).collect(),
        }
    }

    fn picked(failures: &[RankFailure]) -> usize {
        pick(failures.to_vec()).unwrap().rank
    }

    const LOST: &str = "Error: PeerLost: barrier #2: the connection was closed (peer: rank 2)";

    #[test]
    fn the_one_whom_the_others_blame_is_named_though_it_ended_last() {
        let failures = [
            failure(0, End::Code(1), LOST),
            failure(3, End::Code(1), LOST),
            failure(2, End::Code(101), "thread 'main' panicked: on purpose"),
        ];
        assert_eq!(picked(&failures), 2);
        let left = "Error: Aborted: rank 0 of group \"world\": barrier #1 after 0.2 s: rank 2 \
                    dropped the group without a shutdown";
        let failures = [
            failure(0, End::Code(1), left),
            failure(2, End::Code(101), "thread 'main' panicked: on purpose"),
        ];
        assert_eq!(picked(&failures), 2);
    }

    #[test]
    fn without_blame_the_first_to_end_is_named() {
        let failures = [
            failure(3, End::Code(1), "Error: no such file"),
            failure(0, End::Code(1), "Error: no such file"),
        ];
        assert_eq!(picked(&failures), 3);
        // The one that they blame is still there.
        let failures = [
            failure(0, End::Code(1), LOST),
            failure(1, End::Code(1), LOST),
        ];
        assert_eq!(picked(&failures), 0);
        // They blame each other.
        let each_other = [
            failure(1, End::Code(1), "timed out (peer: rank 2)"),
            failure(2, End::Code(1), "timed out (peer: rank 1)"),
        ];
        assert_eq!(picked(&each_other), 1);
    }

    #[test]
    fn who_was_killed_is_named_before_those_who_complain() {
        let failures = [
            failure(0, End::Signal(6), "terminate called, connection closed"),
            failure(1, End::Signal(9), ""),
        ];
        assert_eq!(picked(&failures), 1);
        assert_eq!(pick(vec![]), None);
    }
}

//! What is measured.

use crate::bench::load::{BarrierForm, Disturbance, Pattern, Work};

/// One line of the comparison.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) work: Work,
    pub(crate) names: Names,
}

/// What becomes of a server's questions for its clients' names. PyTorch's asks about every client
/// that comes to the socket it opens by default; ours never asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// It listens where PyTorch's asks nothing: an IPv4 socket handed to it.
    NotAsked,
    /// It listens as by default, and a name server on this machine answers at once.
    Answered,
    /// It listens as by default, and the name server falls silent when the window begins.
    Silent,
}

const STORM: usize = 10_000;

const fn pairs(name: &'static str, conns: usize, pattern: Pattern) -> Case {
    let work = Work::Pairs {
        conns,
        pattern,
        fixed: false,
    };
    case(name, work)
}

const fn case(name: &'static str, work: Work) -> Case {
    Case {
        name,
        work,
        names: Names::NotAsked,
    }
}

/// All cases, in the order in which they run.
pub(crate) const CASES: [Case; 13] = [
    pairs("pairs-1-torch", 1, Pattern::Torch),
    pairs("pairs-1-pipelined", 1, Pattern::Pipelined),
    pairs("pairs-32-torch", 32, Pattern::Torch),
    pairs("pairs-32-pipelined", 32, Pattern::Pipelined),
    case(
        "barrier-256-add",
        Work::Barrier {
            conns: 256,
            form: BarrierForm::Add,
        },
    ),
    case(
        "barrier-256-opcode",
        Work::Barrier {
            conns: 256,
            form: BarrierForm::Opcode,
        },
    ),
    case("connect-1000", Work::ConnectBarrier { conns: 1_000 }),
    case("quiet", Work::Disturbed(Disturbance::None)),
    case("trickle-value", Work::Disturbed(Disturbance::TrickleValue)),
    case("trickle-list", Work::Disturbed(Disturbance::TrickleList)),
    case(
        "storm-10000",
        Work::Disturbed(Disturbance::Storm { conns: STORM }),
    ),
    Case {
        name: "storm-10000-fresh",
        work: Work::Disturbed(Disturbance::Storm { conns: STORM }),
        names: Names::Answered,
    },
    Case {
        name: "no-dns",
        work: Work::Disturbed(Disturbance::Arrivals { conns: 5 }),
        names: Names::Silent,
    },
];

impl Case {
    /// Clients that take part.
    pub(crate) fn conns(&self) -> usize {
        match self.work {
            Work::Pairs { conns, .. }
            | Work::Barrier { conns, .. }
            | Work::ConnectBarrier { conns } => conns,
            Work::Disturbed(Disturbance::None) => 1,
            Work::Disturbed(Disturbance::TrickleValue | Disturbance::TrickleList) => 2,
            Work::Disturbed(Disturbance::Storm { conns } | Disturbance::Arrivals { conns }) => {
                conns + 1
            }
        }
    }

    /// What they do, in a word.
    pub(crate) fn pattern(&self) -> &'static str {
        match self.work {
            Work::Pairs { pattern, .. } => match pattern {
                Pattern::Torch => "set,wait,get",
                Pattern::Pipelined => "set+get",
            },
            Work::Barrier { form, .. } => match form {
                BarrierForm::Add => "add,set,wait",
                BarrierForm::Opcode => "barrier",
            },
            Work::ConnectBarrier { .. } => "connect,ping,barrier",
            Work::Disturbed(_) => "set+get every ms",
        }
    }

    /// Chosen by one of the words of `--only`: its name or the beginning of it.
    pub(crate) fn is_chosen(&self, only: &[String]) -> bool {
        only.is_empty() || only.iter().any(|word| self.name.starts_with(word.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_takes_names_and_their_beginnings() {
        let chosen = |words: &[&str]| {
            let only: Vec<String> = words.iter().map(|&w| w.to_owned()).collect();
            CASES.iter().filter(|c| c.is_chosen(&only)).count()
        };
        assert_eq!(chosen(&[]), CASES.len());
        assert_eq!(chosen(&["pairs"]), 4);
        assert_eq!(chosen(&["pairs-1-torch", "trickle"]), 3);
        assert_eq!(chosen(&["irs"]), 0);
    }
}

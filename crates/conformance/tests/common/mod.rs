//! The wrappers under which the group suite runs, with threads and with processes.

use std::sync::Arc;
use std::time::Duration;

use phalanx_conformance::group::{Case, cases};
use phalanx_pg::{Checked, FaultPlan, Faulty, ProcessGroup, Recorded, Recorder};

type Group = Arc<dyn ProcessGroup>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "each test file uses some")]
pub(crate) enum Wrapper {
    Recorded,
    Checked,
    /// `Faulty` with an empty plan.
    Faultless,
    /// `Faulty` that holds every completion back a little.
    Late,
    /// Recorded around Checked around Faulty.
    All,
}

impl Wrapper {
    pub(crate) fn wrap(self, group: Group, recorder: &Arc<Recorder>) -> Group {
        let checked = |group| -> Group { Checked::new(group).expect("all ranks come") };
        match self {
            Self::Recorded => Recorded::new(group, recorder),
            Self::Checked => checked(group),
            Self::Faultless => Faulty::new(group, FaultPlan::new()),
            Self::Late => {
                let most = Duration::from_micros(200);
                let plan = FaultPlan::new().jitter(group.rank() as u64, most);
                Faulty::new(group, plan)
            }
            Self::All => {
                let inner = Faulty::new(group, FaultPlan::new());
                Recorded::new(checked(inner), recorder)
            }
        }
    }

    /// All cases but those that make no sense inside it.
    pub(crate) fn cases(self) -> Vec<Case> {
        let left_out: &[&str] = match self {
            // A group is checked once; these two do it themselves.
            Self::Checked | Self::All => &[
                "different calls are told apart under Checked",
                "equal calls pass under Checked",
            ],
            // The wrapper holds completions back beyond the barrier's own.
            Self::Late => &["a barrier ends after all earlier work"],
            Self::Recorded | Self::Faultless => &[],
        };
        let mut chosen = cases();
        let all = chosen.len();
        chosen.retain(|case| !left_out.contains(&case.name()));
        assert_eq!(chosen.len() + left_out.len(), all, "a case has a new name");
        chosen
    }

    pub(crate) fn records(self) -> bool {
        matches!(self, Self::Recorded | Self::All)
    }
}

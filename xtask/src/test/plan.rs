//! The beginning of a run: where, for how long, what will be installed and what left out.

use std::fmt;

use super::Args;
use super::needs::Remedy;
use super::suites::Suite;
use crate::nccl;
use crate::shell::{root, target_dir};

/// What a run takes on two cores: seen on faster and slower processors, with nothing and with
/// everything compiled.
const WHOLE_TIME: &str = "; on 2 cores half an hour to an hour the first time, 20 to 35 minutes when everything \
                          is compiled\n--quick takes a third of that and needs Rust alone; --only SUITE runs one";
const QUICK_TIME: &str = "; on 2 cores about 15 minutes the first time";

/// What a run is going to do, in a few lines.
pub(super) struct Plan {
    lines: Vec<String>,
}

impl Plan {
    pub(super) fn new(chosen: &[&Suite], args: &Args) -> Self {
        let running = chosen.iter().filter(|suite| suite.quick || !args.quick);
        let running: Vec<&Suite> = running.copied().collect();
        let mut lines = vec![
            format!("work tree {}", root().display()),
            format!("built in {}", target_dir().display()),
        ];
        let time = match (args.only.is_empty(), args.quick) {
            (false, _) => "",
            (true, false) => WHOLE_TIME,
            (true, true) => QUICK_TIME,
        };
        lines.push(format!("{} suites{time}", running.len()));
        let fetches_nccl = args.require_all && running.iter().any(|suite| suite.name == "nccl");
        if fetches_nccl && !nccl::WHEELS.is_there() {
            lines.push("will download NCCL (305 MB) into the cache directory".into());
        }
        for suite in &running {
            if fetches_nccl && suite.name == "nccl" {
                continue;
            }
            let name = suite.name;
            let remedies = suite.needs.iter().filter_map(|need| need.remedy());
            lines.extend(remedies.map(|remedy| match remedy {
                Remedy::Install(packages) => {
                    let packages = packages.join(" ");
                    format!("will install with apt-get, for {name}: {packages}")
                }
                Remedy::Skip(why) if args.require_all => {
                    format!("will skip {name}, and fail for it: {why}")
                }
                Remedy::Skip(why) => format!("will skip {name}: {why}"),
            }));
        }
        Self { lines }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

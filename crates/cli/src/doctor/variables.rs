//! Environment variables that change what a job does.

use std::ffi::OsString;

use phalanx_store::rendezvous::{LauncherEnv, RendezvousOptions};
use phalanx_store::token::TOKEN_VAR;
use serde::Serialize;

use super::Finding;

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
}

const PREFIXES: [&str; 8] = [
    "PHALANX_",
    "NCCL_",
    "GLOO_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "SLURM_",
];

const NAMES: [&str; 13] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "XDG_RUNTIME_DIR",
    "RUST_LOG",
];

/// What phalanx itself reads; backends have more.
const OURS: [&str; 7] = [
    "PHALANX_BACKEND",
    "PHALANX_DEBUG",
    "PHALANX_DUMP_DIR",
    "PHALANX_LOG",
    "PHALANX_STORE_BIND",
    "PHALANX_TIMEOUT",
    TOKEN_VAR,
];

/// So many letters may differ for a name to count as misspelt.
const TYPING_ERROR: usize = 2;

/// Old names, and what to set instead.
const OBSOLETE: [(&str, &str); 9] = [
    (
        "NCCL_RINGS",
        "NCCL finds its rings itself; NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS bound their number",
    ),
    ("NCCL_MAX_NRINGS", "it is NCCL_MAX_NCHANNELS now"),
    ("NCCL_MIN_NRINGS", "it is NCCL_MIN_NCHANNELS now"),
    ("NCCL_LL_THRESHOLD", "NCCL_PROTO chooses the protocol now"),
    ("NCCL_TREE_THRESHOLD", "NCCL_ALGO chooses the algorithm now"),
    ("NCCL_SINGLE_RING_THRESHOLD", "it has no successor"),
    ("NCCL_IB_CUDA_SUPPORT", "it is NCCL_NET_GDR_LEVEL now"),
    (
        "NCCL_BLOCKING_WAIT",
        "it is TORCH_NCCL_BLOCKING_WAIT now, and PyTorch's",
    ),
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "it is TORCH_NCCL_ASYNC_ERROR_HANDLING now, and PyTorch's",
    ),
];

/// Values that take something away, and what.
const UNWISE: [((&str, &str), &str); 1] = [(
    ("NCCL_COMM_BLOCKING", "1"),
    "NCCL waits inside its calls, whatever a backend asks for: timeouts are kept by aborting only",
)];

/// The variables that matter, in order; a secret is not shown.
pub(super) fn of_interest(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<Variable> {
    let mut found: Vec<Variable> = all
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| {
            NAMES.contains(&name.as_str()) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        })
        .map(|(name, value)| {
            let value = match name == TOKEN_VAR {
                true => format!("({} bytes, not shown)", value.len()),
                false => value.to_string_lossy().into_owned(),
            };
            Variable { name, value }
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

pub(super) fn findings(variables: &[Variable]) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    // What a rank started now would say.
    if let Err(err) = LauncherEnv::from_env() {
        found.push(Finding::problem(format!("no rank can start here: {err}")));
    }
    if let Err(err) = RendezvousOptions::from_env() {
        found.push(Finding::problem(err.to_string()));
    }
    found.extend(variables.iter().filter_map(oddity));
    found
}

fn oddity(variable: &Variable) -> Option<Finding> {
    let name = variable.name.as_str();
    if let Some((_, instead)) = OBSOLETE.iter().find(|(old, _)| *old == name) {
        return Some(Finding::warning(format!("{name} is obsolete: {instead}")));
    }
    if let Some((_, why)) = UNWISE
        .iter()
        .find(|(unwise, _)| *unwise == (name, variable.value.as_str()))
    {
        return Some(Finding::warning(format!(
            "{name}={}: {why}",
            variable.value
        )));
    }
    let near = |ours: &&str| (1..=TYPING_ERROR).contains(&strsim::levenshtein(ours, name));
    let meant = OURS.into_iter().find(near)?;
    Some(Finding::warning(format!("{name}: is {meant} meant?")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(name: &str, value: &str) -> Variable {
        Variable {
            name: name.into(),
            value: value.into(),
        }
    }

    #[test]
    fn secrets_are_counted_not_shown() {
        let all = [("PHALANX_TOKEN", "secret"), ("HOME", "/x"), ("RANK", "0")];
        let all = all.map(|(name, value)| (name.into(), value.into()));
        let shown = of_interest(all.into_iter());
        let expected = [
            variable("PHALANX_TOKEN", "(6 bytes, not shown)"),
            variable("RANK", "0"),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn old_and_misspelt_names_are_told() {
        for (name, text) in [
            ("NCCL_RINGS", "NCHANNELS"),
            ("NCCL_LL_THRESHOLD", "NCCL_PROTO"),
            ("PHALANX_TIMOUT", "is PHALANX_TIMEOUT meant"),
        ] {
            let finding = oddity(&variable(name, "1")).unwrap();
            assert!(finding.what.contains(text), "{finding:?}");
        }
        let blocking = oddity(&variable("NCCL_COMM_BLOCKING", "1")).unwrap();
        assert!(blocking.what.contains("timeouts"), "{blocking:?}");
        assert_eq!(oddity(&variable("NCCL_COMM_BLOCKING", "0")), None);
        for name in ["NCCL_DEBUG", "PHALANX_TIMEOUT", "PHALANX_NATIVE_X", "RANK"] {
            assert_eq!(oddity(&variable(name, "1")), None, "{name}");
        }
    }
}

//! `--launcher mpirun`: MPI starts the ranks, on its hosts and with its binding.

use std::ffi::{OsStr, OsString};
use std::process::Command;

/// The two families of MPI that are out there, which name the same option differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    OpenMpi,
    /// MPICH and Intel MPI.
    Hydra,
}

impl Family {
    /// What `mpirun --version` says about itself.
    fn from_version(text: &str) -> Option<Self> {
        if text.contains("Open MPI") || text.contains("OpenRTE") || text.contains("PRRTE") {
            Some(Self::OpenMpi)
        } else if text.contains("HYDRA") || text.contains("Intel(R) MPI") {
            Some(Self::Hydra)
        } else {
            None
        }
    }

    pub(super) fn of_installed() -> Result<Self, String> {
        let install = "on Debian: apt-get install openmpi-bin";
        let output = Command::new("mpirun").arg("--version").output();
        let output = output.map_err(|err| format!("mpirun: {err}; {install}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Self::from_version(&text).ok_or_else(|| {
            let first = text.lines().next().unwrap_or_default();
            format!("mpirun is neither Open MPI nor MPICH: {first:?}")
        })
    }
}

/// Variables that ranks on other hosts need as well.
fn is_passed_on(name: &str) -> bool {
    const PREFIXES: [&str; 6] = ["PHALANX_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "RUST_"];
    const NAMES: [&str; 4] = [
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "LD_LIBRARY_PATH",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The arguments of `mpirun`. Variables go by name, so that no secret is seen in a list of
/// processes.
pub(super) fn arguments<'a>(
    family: Family,
    nproc: usize,
    variables: impl Iterator<Item = &'a str>,
    program: &[OsString],
) -> Vec<OsString> {
    let mut names: Vec<&str> = variables.filter(|name| is_passed_on(name)).collect();
    names.sort_unstable();
    names.dedup();
    let mut args: Vec<OsString> = vec!["-n".into(), nproc.to_string().into()];
    match family {
        Family::OpenMpi => {
            for name in names {
                args.extend(["-x".into(), OsStr::new(name).to_owned()]);
            }
        }
        Family::Hydra if !names.is_empty() => {
            args.extend(["-genvlist".into(), names.join(",").into()]);
        }
        Family::Hydra => {}
    }
    args.extend_from_slice(program);
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_go_by_name_and_only_those_that_matter() {
        let program = ["./train".into(), "--lr".into(), "3".into()];
        let names = ["PHALANX_TOKEN", "HOME", "MASTER_ADDR", "PHALANX_TOKEN"];
        let shown = |family| {
            let args = arguments(family, 4, names.into_iter(), &program);
            args.join(OsStr::new(" ")).into_string().unwrap()
        };
        assert_eq!(
            shown(Family::OpenMpi),
            "-n 4 -x MASTER_ADDR -x PHALANX_TOKEN ./train --lr 3"
        );
        assert_eq!(
            shown(Family::Hydra),
            "-n 4 -genvlist MASTER_ADDR,PHALANX_TOKEN ./train --lr 3"
        );
    }

    #[test]
    fn the_family_is_known_by_what_it_says() {
        for (text, family) in [
            ("mpirun (Open MPI) 4.1.4\n", Some(Family::OpenMpi)),
            ("HYDRA build details:\n", Some(Family::Hydra)),
            ("something else", None),
        ] {
            assert_eq!(Family::from_version(text), family);
        }
    }
}

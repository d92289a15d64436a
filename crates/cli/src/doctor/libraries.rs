//! Where shared libraries lie. Looks at names of files; loads and runs nothing.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::Finding;

#[derive(Debug, Serialize)]
pub(super) struct Library {
    pub(super) name: &'static str,
    pub(super) used_for: &'static str,
    pub(super) path: Option<PathBuf>,
    #[serde(skip)]
    install: &'static str,
}

impl Library {
    pub(super) fn finding(&self) -> Option<Finding> {
        let Self {
            name,
            used_for,
            install,
            ..
        } = self;
        let missing = self.path.is_none() && !install.is_empty();
        missing.then(|| Finding::advice(format!("{name} is not there ({used_for}): {install}")))
    }
}

pub(super) fn find_all() -> Vec<Library> {
    let dirs = library_dirs();
    let library = |name, file: &str, used_for, install| Library {
        name,
        used_for,
        path: find(&dirs, |found| is_version_of(found, file)),
        install,
    };
    let mpirun = std::env::var_os("PATH").unwrap_or_default();
    let programs: Vec<PathBuf> = std::env::split_paths(&mpirun).collect();
    vec![
        library(
            "libgloo",
            "libgloo.so",
            "the backend gloo",
            "on Debian: apt-get install libgloo-dev",
        ),
        library(
            "libmpi",
            "libmpi.so",
            "the backend mpi",
            "on Debian: apt-get install libopenmpi-dev",
        ),
        Library {
            name: "mpirun",
            used_for: "phalanx run --launcher mpirun",
            path: find(&programs, |found| found == "mpirun"),
            install: "on Debian: apt-get install openmpi-bin",
        },
        // Only of use with a GPU, whose driver brings libcuda.
        library(
            "libcuda",
            "libcuda.so",
            "the backend nccl, from the driver",
            "",
        ),
        nccl(
            std::env::var_os(NCCL_VAR),
            library("libnccl", "libnccl.so", "the backend nccl", ""),
        ),
    ]
}

/// Names the library that the backend nccl loads, instead of where it is looked for otherwise.
const NCCL_VAR: &str = "PHALANX_NCCL_LIBRARY";

/// What the backend loads: what was chosen, as a path or as a name for the loader, else `found`.
fn nccl(chosen: Option<OsString>, found: Library) -> Library {
    let Some(chosen) = chosen.map(PathBuf::from) else {
        return found;
    };
    let is_path = chosen.components().count() > 1;
    let path = match is_path {
        true => chosen.is_file().then_some(chosen),
        false => find(&library_dirs(), |name| chosen.as_os_str() == name),
    };
    Library {
        path,
        install: "it is what PHALANX_NCCL_LIBRARY names",
        ..found
    }
}

/// `libmpi.so`, `libmpi.so.40`, `libmpi.so.40.30.4`.
fn is_version_of(found: &str, file: &str) -> bool {
    let rest = found.strip_prefix(file);
    rest.is_some_and(|rest| rest.chars().all(|c| c == '.' || c.is_ascii_digit()))
}

fn find(dirs: &[PathBuf], is_it: impl Fn(&str) -> bool) -> Option<PathBuf> {
    dirs.iter().find_map(|dir| {
        let files = fs::read_dir(dir).ok()?.filter_map(Result::ok);
        let mut found: Vec<PathBuf> = files
            .filter(|file| file.file_name().to_str().is_some_and(&is_it))
            .map(|file| file.path())
            .collect();
        found.sort();
        found.into_iter().next()
    })
}

/// Where the dynamic linker looks, in its order; a directory that is no absolute path is left out.
fn library_dirs() -> Vec<PathBuf> {
    let chosen = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&chosen).collect();
    let listed = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten();
    let mut lists: Vec<PathBuf> = listed.filter_map(|file| Some(file.ok()?.path())).collect();
    lists.sort();
    lists.push("/etc/ld.so.conf".into());
    for list in lists {
        dirs.extend(dirs_in(&fs::read_to_string(list).unwrap_or_default()));
    }
    dirs.extend(
        [
            "/lib",
            "/usr/lib",
            "/lib64",
            "/usr/lib64",
            "/usr/local/lib",
            "/usr/local/cuda/lib64",
        ]
        .map(PathBuf::from),
    );
    dirs.retain(|dir| dir.is_absolute());
    dirs
}

/// The directories in a configuration file of the dynamic linker.
fn dirs_in(text: &str) -> Vec<PathBuf> {
    let lines = text.lines().map(str::trim);
    lines
        .filter(|line| line.starts_with('/'))
        .map(|line| Path::new(line).to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_under_each_of_its_names() {
        for name in ["libmpi.so", "libmpi.so.40", "libmpi.so.40.30.4"] {
            assert!(is_version_of(name, "libmpi.so"), "{name}");
        }
        for name in ["libmpi_cxx.so", "libmpi.so.txt", "libmpi.a", "libmpi.sox"] {
            assert!(!is_version_of(name, "libmpi.so"), "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("libx.so.2"), "").unwrap();
        let dirs = ["/nowhere".into(), dir.path().to_owned()];
        let found = find(&dirs, |name| is_version_of(name, "libx.so"));
        assert_eq!(found, Some(dir.path().join("libx.so.2")));
    }

    #[test]
    fn the_chosen_library_is_looked_for_instead() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("libnccl-of-my-own.so");
        fs::write(&own, "").unwrap();
        let found = || Library {
            name: "libnccl",
            used_for: "the backend nccl",
            path: Some("/usr/lib/libnccl.so.2".into()),
            install: "",
        };
        assert_eq!(nccl(None, found()).path, found().path);
        assert_eq!(nccl(Some(own.clone().into()), found()).path, Some(own));
        for wrong in ["/none/at/all.so", "libnone-of-this-name.so"] {
            let missing = nccl(Some(wrong.into()), found());
            assert_eq!(missing.path, None, "{wrong}");
            let finding = missing.finding().unwrap();
            assert!(finding.what.contains(NCCL_VAR), "{finding:?}");
        }
    }

    #[test]
    fn a_configuration_of_the_linker_is_read() {
        let text = "# text\ninclude /etc/x/*.conf\n/usr/lib/a\n  /usr/lib/b \n";
        assert_eq!(
            dirs_in(text),
            ["/usr/lib/a", "/usr/lib/b"].map(PathBuf::from)
        );
    }
}

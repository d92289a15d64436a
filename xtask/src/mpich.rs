//! MPICH beside the system's MPI, for the tests of the mpi backend.

use std::path::{Path, PathBuf};

use crate::shell::{Cmd, target_dir};
use crate::{Failure, cache};

/// Debian's packages with the library, its headers, its launcher, and what that one links.
const PACKAGES: [&str; 4] = ["libmpich12", "libmpich-dev", "mpich", "libslurm38"];
const DISK: &str = "about 20 MB to download, 80 MB on disk";

/// The tests of the mpi backend, on MPICH.
pub(crate) fn tests() -> Result<Cmd, Failure> {
    let root = unpacked()?;
    let library = library_dir(&root)?;
    let launcher = root.join("usr/bin/mpiexec.hydra");
    let launcher = format!("{} -n {{n}}", launcher.display());
    let test = Cmd::cargo().args(["test", "--package", "phalanx-mpi", "--no-fail-fast"]);
    Ok(test
        .env("MPI_PKG_CONFIG", "mpich")
        .env("PKG_CONFIG_PATH", &root)
        .env("LD_LIBRARY_PATH", &library)
        .env("PHALANX_TEST_MPIRUN", launcher)
        .env("CARGO_TARGET_DIR", target_dir().join("mpich")))
}

/// Where MPICH is, fetched and unpacked if need be. Nothing is installed.
fn unpacked() -> Result<PathBuf, Failure> {
    let root = cache::dir("mpich")?;
    let described = root.join("mpich.pc");
    if described.is_file() {
        return Ok(root);
    }
    println!("unpacking MPICH into {} ({DISK})", root.display());
    std::fs::create_dir_all(&root)?;
    let script = format!(
        "cd '{}' && apt-get download {} && for deb in *.deb; do dpkg -x \"$deb\" . || exit 1; done; \
         rm -f ./*.deb",
        root.display(),
        PACKAGES.join(" ")
    );
    if !Cmd::new("sh").args(["-c", &script]).status()?.success() {
        return Err(
            "MPICH's packages could not be fetched: this needs Debian, and a network".into(),
        );
    }
    let library = library_dir(&root)?;
    let headers = library.strip_prefix(root.join("usr/lib"))?;
    let headers = root.join("usr/include").join(headers).join("mpich");
    let text = format!(
        "Name: mpich\nDescription: MPICH beside the system\nVersion: 4\n\
         Libs: -L{} -lmpich\nCflags: -I{}\n",
        library.display(),
        headers.display()
    );
    std::fs::write(described, text)?;
    Ok(root)
}

/// The directory of its library, which is named after the machine's architecture.
fn library_dir(root: &Path) -> Result<PathBuf, Failure> {
    let dirs = std::fs::read_dir(root.join("usr/lib"))?;
    let mut dirs = dirs.flatten().map(|entry| entry.path());
    let found = dirs.find(|dir| dir.join("libmpich.so").exists());
    found.ok_or_else(|| "MPICH's packages have no libmpich.so".into())
}

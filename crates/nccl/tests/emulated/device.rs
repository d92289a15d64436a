//! The emulated libraries, where loaders find them.

use std::path::{Path, PathBuf};

use phalanx_testkit::World;
use tempfile::TempDir;

/// The emulated libraries under the names that loaders look for.
pub(crate) struct Emulator {
    dir: TempDir,
}

/// Where cargo puts the shared libraries: beside the test program.
fn built(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let dir = program.parent().expect("a directory");
    let library = dir.join(name);
    assert!(library.exists(), "{} is not there", library.display());
    library
}

impl Emulator {
    pub(crate) fn new() -> Self {
        let emulator = Self::without_nccl();
        emulator.link(&built("libemu_nccl.so"), ["libnccl.so", "libnccl.so.2"]);
        emulator
    }

    /// A driver, but no NCCL.
    pub(crate) fn without_nccl() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let emulator = Self { dir };
        emulator.link(&built("libemu_cuda.so"), ["libcuda.so", "libcuda.so.1"]);
        emulator
    }

    /// Under both names: loaders try the first one everywhere before the second.
    fn link(&self, library: &Path, names: [&str; 2]) {
        for name in names {
            std::os::unix::fs::symlink(library, self.dir.path().join(name)).expect("a link");
        }
    }

    /// A world whose ranks have the emulated device.
    pub(crate) fn world(&self, size: usize) -> World {
        World::new(size).env("LD_LIBRARY_PATH", self.dir.path())
    }
}

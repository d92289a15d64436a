//! Ranks on the emulated device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_nccl::{NcclGroup, Options};
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{Buffer, Device, Element, ProcessGroup};
use phalanx_testkit::{Rank, World};
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
        let dir = tempfile::tempdir().expect("a directory");
        let link = |library: &Path, name: &str| {
            std::os::unix::fs::symlink(library, dir.path().join(name)).expect("a link");
        };
        let (cuda, nccl) = (built("libemu_cuda.so"), built("libemu_nccl.so"));
        // Both names: loaders try the first one everywhere before the second.
        link(&cuda, "libcuda.so");
        link(&cuda, "libcuda.so.1");
        link(&nccl, "libnccl.so");
        link(&nccl, "libnccl.so.2");
        Self { dir }
    }

    /// A world whose ranks have the emulated device.
    pub(crate) fn world(&self, size: usize) -> World {
        World::new(size).env("LD_LIBRARY_PATH", self.dir.path())
    }
}

/// This rank's group.
pub(crate) fn connect(rank: &Rank) -> Arc<dyn ProcessGroup> {
    connect_with(rank, &Options::default(), |_| ())
}

pub(crate) fn connect_with(
    rank: &Rank,
    options: &Options,
    change: impl FnOnce(&mut GroupInit),
) -> Arc<dyn ProcessGroup> {
    let mut init = GroupInit::new(rank.store(), rank.rank(), rank.size());
    init.timeout = std::time::Duration::from_secs(60);
    change(&mut init);
    NcclGroup::connect_with(&init, options).expect("a group")
}

/// The device of a group: each rank has its own.
pub(crate) fn device(group: &dyn ProcessGroup) -> Device {
    Device::Cuda(group.global_ranks()[group.rank()] as u32)
}

pub(crate) fn upload<T: Element>(group: &dyn ProcessGroup, values: &[T]) -> Buffer {
    let mut buffer = group
        .allocate(device(group), T::DTYPE, values.len())
        .expect("device memory");
    let host = Buffer::from_slice(values);
    group.copy(&host, &mut buffer, 0).expect("a copy");
    buffer
}

pub(crate) fn download<T: Element>(group: &dyn ProcessGroup, buffer: &Buffer) -> Vec<T> {
    let mut host = Buffer::zeroed(buffer.dtype(), buffer.len());
    group.copy(buffer, &mut host, 0).expect("a copy");
    host.to_vec().expect("host memory")
}

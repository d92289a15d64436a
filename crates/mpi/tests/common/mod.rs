//! What the tests of this crate share.
#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::sync::Arc;
use std::time::Duration;

use phalanx_mpi::MpiGroup;
use phalanx_pg::ProcessGroup;
use phalanx_testkit::{Rank, World};

/// Below the world's deadline, so that an error names the operation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const DEADLINE: Duration = Duration::from_secs(240);

/// The launcher with its arguments, if it is not Open MPI's.
const LAUNCHER_VAR: &str = "PHALANX_TEST_MPIRUN";

/// Ranks that mpirun starts. More of them than cores, on one host, and as root if need be: what
/// Open MPI would otherwise refuse.
pub(crate) fn mpirun(size: usize) -> World {
    let launcher = std::env::var(LAUNCHER_VAR);
    let launcher = launcher.unwrap_or_else(|_| "mpirun -n {n} --oversubscribe".into());
    World::new(size)
        .launcher(launcher.split(' '))
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .deadline(DEADLINE)
}

pub(crate) fn connect(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    let group = MpiGroup::world(TIMEOUT).unwrap();
    assert_eq!((group.rank(), group.size()), (ctx.rank(), ctx.size()));
    group
}

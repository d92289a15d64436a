//! How the ranks of a job meet: what a launcher says, as plain data.

mod env;
mod mpi;
mod nodelist;
mod slurm;
mod timeout;
mod vars;

pub use env::{JobKey, Launcher, LauncherEnv, MeetingPoint};
pub use timeout::Timeouts;

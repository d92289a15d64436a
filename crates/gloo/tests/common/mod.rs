//! What the tests of this crate share.
#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::sync::Arc;
use std::time::Duration;

use phalanx_gloo::GlooGroup;
use phalanx_pg::ProcessGroup;
use phalanx_pg::registry::GroupInit;
use phalanx_testkit::Rank;

/// Below the world's deadline, so that an error names the operation.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const DEADLINE: Duration = Duration::from_secs(240);

pub(crate) fn init(ctx: &Rank) -> GroupInit {
    let mut init = GroupInit::new(ctx.store(), ctx.rank(), ctx.size());
    init.timeout = TIMEOUT;
    init
}

pub(crate) fn connect(ctx: &Rank) -> Arc<dyn ProcessGroup> {
    GlooGroup::connect(&init(ctx)).unwrap()
}

//! The program of the README: every rank contributes, every rank gets the sum.

use phalanx::prelude::*;

fn main() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let mut values = [group.rank() as f32, 1.0];
    group.allreduce_in_place(&mut values, ReduceOp::Sum)?;
    println!("rank {} of {}: {values:?}", group.rank(), group.size());
    group.shutdown()
}

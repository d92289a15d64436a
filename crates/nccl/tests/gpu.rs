//! The same scenarios on real GPUs with NVIDIA's libraries, two or more. We have none: these have
//! not been run by us.
//!
//! ```sh
//! cargo test -p phalanx-nccl --test gpu -- --test-threads=1
//! ```

mod scenarios;

use std::time::Duration;

use cudarc::driver::result;
use phalanx_nccl::Options;
use phalanx_testkit::World;

use scenarios::{ddp, faults};

/// Number of GPUs that this process sees; none without a driver.
fn gpus() -> usize {
    // SAFETY: it is the driver, if there is one; cudarc would panic without.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_err() {
        return 0;
    }
    let count = result::init().and_then(|()| result::device::get_count());
    count.map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

fn world(size: usize) -> World {
    let gpus = gpus();
    assert!(
        gpus >= size,
        "this test needs {size} GPUs with NVIDIA's driver, and there are {gpus}"
    );
    World::new(size).deadline(Duration::from_secs(600))
}

/// Four ranks, or as many as there are GPUs; two at least.
fn up_to_four() -> World {
    world(gpus().clamp(2, 4))
}

#[test]
fn gpu_an_operation_waits_for_its_input_and_the_host_does_not() {
    world(2).run(|rank| {
        assert_eq!(
            scenarios::sum_of_late_input(rank, false).unwrap(),
            [3.0; 1000]
        );
    });
}

#[test]
fn gpu_the_calling_threads_own_stream_is_waited_for() {
    world(2).run(|rank| {
        assert_eq!(
            scenarios::sum_of_late_input(rank, true).unwrap(),
            [3.0; 1000]
        );
    });
}

#[test]
fn gpu_dropped_works_keep_their_memory() {
    world(2).run(|rank| {
        scenarios::dropped_works_keep_their_memory(rank);
    });
}

#[test]
fn gpu_batches_are_one_operation() {
    world(2).run(|rank| {
        scenarios::batches(rank);
    });
}

#[test]
fn gpu_operators_and_types_are_nccls() {
    world(2).run(|rank| {
        scenarios::operators(rank);
    });
}

#[test]
fn gpu_suite_passes_with_two_ranks() {
    world(2).run(|rank| println!("{}", scenarios::suite(rank, &Options::default())));
}

#[test]
fn gpu_suite_passes_with_up_to_four_ranks() {
    up_to_four().run(|rank| println!("{}", scenarios::suite(rank, &Options::default())));
}

#[test]
fn gpu_suite_passes_with_communicators_that_are_divided() {
    up_to_four().run(|rank| {
        let mut options = Options::default();
        options.eager = true;
        println!("{}", scenarios::suite(rank, &options));
    });
}

#[test]
fn gpu_an_abort_ends_the_others_operations_at_once() {
    world(2).run(|rank| {
        faults::abort(rank);
    });
}

#[test]
fn gpu_a_rank_that_never_comes_is_a_timeout_of_the_first_operation() {
    world(2).run(|rank| {
        faults::never_comes(rank);
    });
}

#[test]
fn gpu_what_was_handed_over_before_a_failure_does_not_reach_the_host() {
    world(2).run(|rank| {
        faults::stays_away(rank);
    });
}

#[test]
fn gpu_ddp_gives_pytorchs_numbers_with_two_ranks() {
    world(2).run(|rank| {
        ddp::replay_all(rank);
    });
}

#[test]
fn gpu_ddp_gives_pytorchs_numbers_with_four_ranks() {
    world(4).run(|rank| {
        ddp::replay_all(rank);
    });
}

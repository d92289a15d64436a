//! The same scenarios on real GPUs with NVIDIA's libraries, two or more. We have none: these have
//! not been run by us.
//!
//! ```sh
//! cargo test -p phalanx-nccl --test gpu -- --test-threads=1
//! ```

mod scenarios;

use std::time::Duration;

use phalanx_testkit::World;

#[test]
fn gpu_an_operation_waits_for_its_input_and_the_host_does_not() {
    World::new(2).run(|rank| {
        assert_eq!(
            scenarios::sum_of_late_input(rank, false).unwrap(),
            [3.0; 1000]
        );
    });
}

#[test]
fn gpu_the_calling_threads_own_stream_is_waited_for() {
    World::new(2).run(|rank| {
        assert_eq!(
            scenarios::sum_of_late_input(rank, true).unwrap(),
            [3.0; 1000]
        );
    });
}

#[test]
fn gpu_dropped_works_keep_their_memory() {
    World::new(2).run(|rank| {
        scenarios::dropped_works_keep_their_memory(rank);
    });
}

#[test]
fn gpu_batches_are_one_operation() {
    World::new(2).run(|rank| {
        scenarios::batches(rank);
    });
}

#[test]
fn gpu_operators_and_types_are_nccls() {
    World::new(2).run(|rank| {
        scenarios::operators(rank);
    });
}

#[test]
fn gpu_suite_passes_with_two_ranks() {
    let world = World::new(2).deadline(Duration::from_secs(600));
    world.run(|rank| println!("{}", scenarios::suite(rank)));
}

//! How groups come to be, and what is said if they cannot.

use std::time::Duration;

use phalanx_nccl::{NcclGroup, Options};
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Buffer, DType, Device, Error, ErrorKind, ProcessGroup, ProcessGroupExt, ReduceOp,
};
use phalanx_testkit::{Rank, World};

use crate::device::{Emulator, count};
use crate::scenarios::ddp::connect_both;
use crate::scenarios::{connect, connect_with, download, upload};

fn refused(rank: &Rank, options: &Options) -> Error {
    let init = GroupInit::new(rank.store(), rank.rank(), rank.size());
    NcclGroup::connect_with(&init, options).expect_err("it cannot work")
}

#[test]
fn emu_communicators_are_made_early_if_asked_for() {
    Emulator::new().world(2).run(|rank| {
        let mut options = Options::default();
        (options.eager, options.high_priority) = (true, true);
        let group = connect_with(rank, &options, "world", Duration::from_secs(60));
        let sum = group.allreduce(upload(&*group, &[1i64]), ReduceOp::Sum);
        let sum = sum.unwrap().wait().unwrap();
        assert_eq!(download::<i64>(&*group, &sum), [2]);
        group.shutdown().unwrap();
    });
}

/// As in `docs/nccl.md`: every process sees all devices and has one of them.
#[test]
fn emu_a_group_says_which_device_is_its_own() {
    let emulator = Emulator::new();
    let world = emulator.world(2).env("EMU_CUDA_DEVICES", "2");
    world.run(|rank| {
        let group = connect_both(rank, Duration::from_secs(60));
        assert_eq!(group.device(), Device::Cuda(rank.rank() as u32));
        let gradients = group.allocate(group.device(), DType::F32, 5).unwrap();
        let sum = group.allreduce(gradients, ReduceOp::Avg).unwrap();
        let sum = sum.wait().unwrap();
        assert_eq!(download::<f32>(&*group, &sum), [0.0; 5]);
        // Numbered otherwise than its ranks.
        let turned = group.split(&[1, 0], "turned").unwrap().unwrap();
        assert_eq!(turned.device(), group.device());
        assert_eq!(places(&*turned, rank.rank()), [1, 0]);
        turned.shutdown().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn emu_an_early_communicator_that_a_rank_does_not_join_is_a_timeout() {
    Emulator::new().world(2).run(|rank| {
        if rank.rank() == 0 {
            let mut init = GroupInit::new(rank.store(), 0, 2);
            init.timeout = Duration::from_millis(300);
            let err = NcclGroup::connect_with(&init, &eager()).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Timeout, "{err}");
        }
    });
}

/// What is documented, where there is no device.
#[test]
fn emu_a_group_can_do_what_the_backend_says() {
    Emulator::new().world(1).run(|rank| {
        let own = connect(rank).capabilities();
        let said = phalanx_nccl::capabilities();
        assert_eq!(format!("{own:?}"), format!("{said:?}"));
    });
}

fn eager() -> Options {
    let mut options = Options::default();
    options.eager = true;
    options
}

/// The group's sum of what each rank has, which tells who is in it and in which order.
fn places(group: &dyn ProcessGroup, world_rank: usize) -> Vec<i64> {
    let mut own = vec![0; group.size()];
    own[group.rank()] = world_rank as i64;
    let sum = group.allreduce(upload(group, &own), ReduceOp::Sum);
    download(group, &sum.unwrap().wait().unwrap())
}

#[test]
fn emu_a_split_of_all_ranks_divides_the_communicator_there_is() {
    Emulator::new().world(3).run(|rank| {
        let group = connect_with(rank, &eager(), "world", Duration::from_secs(60));
        // Operations before it are still in progress on the device.
        let before = group.allreduce(upload(&*group, &[1i64; 5000]), ReduceOp::Sum);
        let turned = group.split(&[2, 0, 1], "turned").unwrap().unwrap();
        assert_eq!(count("emu_nccl_splits"), 1);
        let again = turned.split(&[2, 1, 0], "again").unwrap().unwrap();
        assert_eq!(count("emu_nccl_splits"), 2);
        assert_eq!(places(&*turned, rank.rank()), [2, 0, 1]);
        assert_eq!(places(&*again, rank.rank()), [1, 0, 2]);
        assert_eq!(places(&*group, rank.rank()), [0, 1, 2]);
        let before = before.unwrap().wait().unwrap();
        assert_eq!(download::<i64>(&*group, &before), [3; 5000]);
        // The end of one is not the end of the others.
        group.shutdown().unwrap();
        assert_eq!(places(&*turned, rank.rank()), [2, 0, 1]);
        again.shutdown().unwrap();
        turned.shutdown().unwrap();
    });
}

#[test]
fn emu_a_split_of_some_ranks_needs_no_others() {
    Emulator::new().world(3).run(|rank| {
        let group = connect_with(rank, &eager(), "world", Duration::from_secs(60));
        if rank.rank() < 2 {
            let pair = group.split(&[1, 0], "pair").unwrap().unwrap();
            assert_eq!(places(&*pair, rank.rank()), [1, 0]);
            pair.shutdown().unwrap();
        }
        assert_eq!(count("emu_nccl_splits"), 0);
        group.shutdown().unwrap();
    });
}

#[test]
fn emu_groups_that_meet_late_are_split_without_their_communicator() {
    Emulator::new().world(2).run(|rank| {
        let group = connect(rank);
        let turned = group.split(&[1, 0], "turned").unwrap().unwrap();
        assert_eq!(places(&*turned, rank.rank()), [1, 0]);
        assert_eq!(count("emu_nccl_splits"), 0);
        turned.shutdown().unwrap();
        group.shutdown().unwrap();
    });
}

#[test]
fn emu_many_ranks_share_the_work_of_handing_out_ids() {
    Emulator::new().world(4).run(|rank| {
        let mut options = Options::default();
        options.ranks_per_root = 2;
        let group = connect_with(rank, &options, "world", Duration::from_secs(60));
        let sum = group.allreduce(upload(&*group, &[1i64]), ReduceOp::Sum);
        let sum = sum.unwrap().wait().unwrap();
        assert_eq!(download::<i64>(&*group, &sum), [4]);
        group.shutdown().unwrap();
    });
}

#[test]
fn emu_a_machine_without_nccl_says_so() {
    Emulator::without_nccl().world(1).run(|rank| {
        let err = refused(rank, &Options::default());
        assert_eq!(err.kind(), ErrorKind::Unsupported);
        assert!(err.to_string().contains("no NCCL library"), "{err}");
    });
}

#[test]
fn emu_a_rank_without_a_device_says_so() {
    let emulator = Emulator::new();
    let world = emulator.world(2).env("EMU_CUDA_DEVICES", "0");
    world.run(|rank| {
        let err = refused(rank, &Options::default());
        assert!(err.to_string().contains("CUDA_ERROR_NO_DEVICE"), "{err}");
    });
    let emulator = Emulator::new();
    let world = emulator.world(3).env("EMU_CUDA_DEVICES", "2");
    world.run(|rank| {
        if rank.rank() == 2 {
            let err = refused(rank, &Options::default());
            assert!(err.to_string().contains("CUDA_VISIBLE_DEVICES"), "{err}");
        }
        let mut options = Options::default();
        options.device = Some(9);
        let err = refused(rank, &options);
        assert!(err.to_string().contains("cuda:9"), "{err}");
    });
}

#[test]
fn emu_a_device_without_pools_of_memory_is_refused() {
    let emulator = Emulator::new();
    let world = emulator.world(1).env("EMU_CUDA_NO_POOLS", "1");
    world.run(|rank| {
        let err = refused(rank, &Options::default());
        assert_eq!(err.kind(), ErrorKind::Unsupported);
        assert!(err.to_string().contains("no memory pools"), "{err}");
    });
}

#[test]
fn a_machine_without_a_driver_says_so() {
    World::new(1).run(|rank| {
        // SAFETY: it is the driver, if there is one.
        if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
            println!("there is a driver: nothing to show");
            return;
        }
        let err = refused(rank, &Options::default());
        assert_eq!(err.kind(), ErrorKind::Unsupported);
        assert!(err.to_string().contains("no CUDA driver"), "{err}");
        assert!(err.to_string().contains("libcuda.so.1: cannot"), "{err}");
    });
}

#[test]
fn emu_memory_of_others_is_refused_and_changes_nothing() {
    Emulator::new().world(2).run(|rank| {
        let group = connect(rank);
        let host = group.allreduce(Buffer::from_vec(vec![1.0f32]), ReduceOp::Sum);
        assert_eq!(host.unwrap_err().kind(), ErrorKind::Unsupported);
        let tagged = group.send(upload(&*group, &[1u8]).freeze(), 1 - rank.rank(), 7);
        assert!(tagged.unwrap_err().to_string().contains("tag 0"));
        let other = Device::Cuda(1 - rank.rank() as u32);
        let err = group.allocate(other, DType::F32, 1).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Unsupported, "{err}");
        assert_eq!(group.sequence(), 0);
        let sum = group.allreduce(upload(&*group, &[1i64]), ReduceOp::Sum);
        let sum = sum.unwrap().wait().unwrap();
        assert_eq!(download::<i64>(&*group, &sum), [2]);
        group.shutdown().unwrap();
    });
}

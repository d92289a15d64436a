//! Nothing is left of a group. Alone in its file, since it counts what the process has.
#![cfg(target_os = "linux")]

mod common;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{FORMS, Form, on_each};
use phalanx_pg::{Buffer, ProcessGroupExt, ReduceOp};

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// Threads and open files.
fn held() -> (usize, usize) {
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// The lane's thread is not waited for when a group is dropped, so it may be a moment late.
fn settles_to(start: (usize, usize)) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while held() != start {
        assert!(Instant::now() < deadline, "{:?} became {:?}", start, held());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn use_and_leave(form: Form, orderly: bool) {
    let together = Arc::new(Barrier::new(4));
    on_each(form.groups(4), move |group| {
        let peer = group.rank() ^ 1;
        let posted = group.recv(Buffer::from_vec(vec![0u8]), peer, 0).unwrap();
        let half = group.split(&[peer & 2, peer | 1], "half").unwrap();
        let buf = || Buffer::from_vec(vec![1f32; 1000]);
        group
            .allreduce(buf(), ReduceOp::Sum)
            .unwrap()
            .wait()
            .unwrap();
        if orderly {
            let data = Buffer::from_vec(vec![0u8]).freeze();
            group.send(data, peer, 0).unwrap().wait().unwrap();
            posted.wait().unwrap();
            half.unwrap().shutdown().unwrap();
            group.shutdown().unwrap();
        } else {
            together.wait();
            // Fails at once if another rank has left before.
            let _ = group.allreduce(buf(), ReduceOp::Sum);
        }
    });
}

#[test]
fn no_thread_and_no_socket_is_left_of_a_group() {
    let start = held();
    for form in FORMS {
        for orderly in [true, false] {
            use_and_leave(form, orderly);
            settles_to(start);
        }
        let groups = form.groups(3);
        groups[1].abort("enough");
        drop(groups);
        settles_to(start);
    }
}

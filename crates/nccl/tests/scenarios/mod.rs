//! What one rank does in a test, on whatever device there is: emulated or real.

pub(crate) mod ddp;
pub(crate) mod faults;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result};
use phalanx_conformance::group::{Level, OnDevice, run_rank};
use phalanx_nccl::{NcclGroup, Options};
use phalanx_pg::registry::GroupInit;
use phalanx_pg::{
    Buffer, Call, DType, Element, Error, ProcessGroup, ProcessGroupExt, RawStream, ReduceOp,
};
use phalanx_testkit::Rank;

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// This rank's group.
pub(crate) fn connect(rank: &Rank) -> Group {
    connect_with(rank, &Options::default(), "world", Duration::from_secs(60))
}

pub(crate) fn connect_with(rank: &Rank, options: &Options, name: &str, timeout: Duration) -> Group {
    let mut init = GroupInit::new(rank.store(), rank.rank(), rank.size());
    init.timeout = timeout;
    init.name = name.into();
    NcclGroup::connect_with(&init, options).expect("a group")
}

pub(crate) fn upload<T: Element>(group: &dyn ProcessGroup, values: &[T]) -> Buffer {
    let room = group.allocate(group.device(), T::DTYPE, values.len());
    let mut buffer = room.expect("device memory");
    let host = Buffer::from_slice(values);
    group
        .copy(&host, 0..host.len(), &mut buffer, 0)
        .expect("a copy");
    buffer
}

pub(crate) fn download<T: Element>(group: &dyn ProcessGroup, buffer: &Buffer) -> Vec<T> {
    try_download(group, buffer).expect("a copy")
}

pub(crate) fn try_download<T: Element>(
    group: &dyn ProcessGroup,
    buffer: &Buffer,
) -> Result<Vec<T>, Error> {
    let mut host = Buffer::zeroed(buffer.dtype(), buffer.len());
    group.copy(buffer, 0..buffer.len(), &mut host, 0)?;
    host.to_vec()
}

/// The program's own stream, as a framework would have one, with a gate that holds it up.
pub(crate) struct Producer {
    _context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

static OPEN: AtomicBool = AtomicBool::new(false);

/// Runs on the stream: what is behind it waits until the gate is open.
unsafe extern "C" fn gate(_: *mut std::ffi::c_void) {
    while !OPEN.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Producer {
    pub(crate) fn new(rank: &Rank) -> Self {
        let context = CudaContext::new(rank.rank()).expect("a device");
        let stream = context.new_stream().expect("a stream");
        Self {
            _context: context,
            stream,
        }
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.stream.cu_stream() as RawStream
    }

    /// Holds up a stream until [`open_gate`](Producer::open_gate).
    pub(crate) fn close_gate(&self, stream: RawStream) {
        OPEN.store(false, Ordering::Release);
        // SAFETY: a stream of this process's, a function without an argument.
        let launched = unsafe {
            result::stream::launch_host_function(stream as _, gate, std::ptr::null_mut())
        };
        launched.expect("a host function on a stream");
    }

    pub(crate) fn open_gate() {
        OPEN.store(true, Ordering::Release);
    }
}

/// Makes the communicator and connects its ranks. Before a gate is closed: on a real device that
/// may wait for what is on the streams.
fn warm_up(group: &dyn ProcessGroup) {
    let sum = group.allreduce(upload(group, &[1i64]), ReduceOp::Sum);
    let sum = sum.expect("accepted").synchronize().expect("succeeds");
    assert_eq!(download::<i64>(group, &sum), [group.size() as i64]);
}

/// An operation issued before its input is there waits for it; the host waits for neither.
///
/// Returns what came out. The input is two copies behind a closed gate.
pub(crate) fn sum_of_late_input(rank: &Rank, per_thread: bool) -> Result<Vec<f32>, Error> {
    let producer = Producer::new(rank);
    let mut options = Options::default();
    // SAFETY: of the rank's device; the producer outlives the group and its memory.
    unsafe { options.set_stream(producer.raw()) };
    let group = connect_with(rank, &options, "world", Duration::from_secs(60));
    warm_up(&*group);
    let values = upload(&*group, &[rank.rank() as f32 + 1.0; 1000]);
    let mut input = group
        .allocate(group.device(), DType::F32, 1000)
        .expect("device memory");
    if per_thread {
        input = on_thread_stream(input);
    }
    producer.close_gate(input.stream());
    group.copy(&values, 0..1000, &mut input, 0).expect("a copy");
    let work = group.allreduce(input, ReduceOp::Sum).expect("accepted");
    let status = work.status();
    let sum = work.wait().expect("issued");
    let ended_early = matches!(status.state(), phalanx_pg::State::Succeeded);
    Producer::open_gate();
    let result = download(&*group, &sum);
    drop(sum);
    group.shutdown()?;
    match ended_early {
        true => Err(Error::invalid("it ended before its input was there")),
        false => Ok(result),
    }
}

/// The same memory, to be used on the calling thread's own default stream.
fn on_thread_stream(buffer: Buffer) -> Buffer {
    let (pointer, dtype, len) = (buffer.as_ptr(), buffer.dtype(), buffer.len());
    let device = buffer.device();
    // SAFETY: `buffer` is given up to keep the memory alive and is reached in no other way.
    unsafe { Buffer::from_raw(pointer, dtype, len, device, 2, Box::new(buffer)) }
}

/// Memory of an operation that nobody waits for lives until it is finished.
pub(crate) fn dropped_works_keep_their_memory(rank: &Rank) {
    let producer = Producer::new(rank);
    let mut options = Options::default();
    // SAFETY: of the rank's device; the producer outlives the group and its memory.
    unsafe { options.set_stream(producer.raw()) };
    let group = connect_with(rank, &options, "world", Duration::from_secs(60));
    warm_up(&*group);
    // The stream of the last operation's memory is another one: nothing but the operation itself
    // keeps the first ones' alive.
    let inputs: Vec<Buffer> = (0..20)
        .map(|i| upload(&*group, &[i as f32; 5000]))
        .collect();
    let gate = group
        .allocate(group.device(), DType::F32, 1)
        .expect("device memory");
    producer.close_gate(gate.stream());
    for input in inputs {
        drop(group.allreduce(input, ReduceOp::Sum).expect("accepted"));
    }
    let last = group.allreduce(gate, ReduceOp::Sum).expect("accepted");
    Producer::open_gate();
    last.synchronize().expect("nothing was freed too early");
    group.shutdown().expect("an orderly end");
}

/// Collectives and messages, several as one.
pub(crate) fn batches(rank: &Rank) {
    let group = connect(rank);
    let (me, size) = (rank.rank(), rank.size());
    let bufs = (1..=3)
        .map(|i| upload(&*group, &[(me * i) as i32; 7]))
        .collect();
    let sums = group
        .allreduce_coalesced(bufs, ReduceOp::Sum)
        .expect("accepted");
    let ranks: usize = (0..size).sum();
    for (i, sum) in (1..=3).zip(sums.wait().expect("succeeds")) {
        assert_eq!(download::<i32>(&*group, &sum), [(ranks * i) as i32; 7]);
    }
    assert_eq!(group.sequence(), 1, "a batch takes one number");
    let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
    let calls = vec![
        Call::Recv {
            buf: upload(&*group, &[0u8; 3]),
            peer: Some(previous),
            tag: 0,
        },
        Call::Send {
            data: upload(&*group, &[me as u8; 3]).freeze(),
            peer: next,
            tag: 0,
        },
    ];
    let mut got = group
        .batch_p2p(calls)
        .expect("accepted")
        .wait()
        .expect("succeeds");
    let received = got.remove(0).expect("a buffer");
    assert_eq!(download::<u8>(&*group, &received), [previous as u8; 3]);
    group.shutdown().expect("an orderly end");
}

/// Averages and premultiplied sums, 16-bit floats and booleans.
pub(crate) fn operators(rank: &Rank) {
    use half::{bf16, f16};
    let group = connect(rank);
    let (me, size) = (rank.rank() as f32, rank.size() as f32);
    let total: f32 = (0..rank.size()).map(|rank| rank as f32).sum();
    let run = |buffer: Buffer, op| {
        group
            .allreduce(buffer, op)
            .expect("accepted")
            .wait()
            .expect("ok")
    };
    let avg = run(upload(&*group, &[me; 5]), ReduceOp::Avg);
    assert_eq!(download::<f32>(&*group, &avg), [total / size; 5]);
    let scaled = run(
        upload(&*group, &[f16::from_f32(me); 5]),
        ReduceOp::PremulSum(0.5),
    );
    assert_eq!(
        download::<f16>(&*group, &scaled),
        [f16::from_f32(total * 0.5); 5]
    );
    let sum = run(upload(&*group, &[bf16::from_f32(me); 5]), ReduceOp::Sum);
    assert_eq!(download::<bf16>(&*group, &sum), [bf16::from_f32(total); 5]);
    let mut truths = group
        .allocate(group.device(), DType::Bool, 2)
        .expect("device memory");
    let own = Buffer::from_bools(&[rank.rank() == 1, false]);
    group.copy(&own, 0..2, &mut truths, 0).expect("a copy");
    let any = run(truths, ReduceOp::Sum);
    assert_eq!(download::<u8>(&*group, &any), [1, 0]);
    group.shutdown().expect("an orderly end");
}

/// The process group suite.
pub(crate) fn suite(rank: &Rank, options: &Options) -> phalanx_conformance::group::Report {
    let group = connect_with(rank, options, "world", Duration::from_secs(60));
    let device = group.device();
    let group: Group = Arc::new(OnDevice::new(group, device));
    let report = run_rank(&group, Level::Sample);
    group.shutdown().expect("an orderly end");
    report
}

//! Backends by name, and groups of one backend per kind of memory.

use std::future::Future;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use phalanx_pg::registry::{self, GroupInit, Registry, Selection};
use phalanx_pg::{
    Buffer, ByDevice, Call, CallKind, CallOptions, Capabilities, Completer, DType, Device, Done,
    Error, ErrorKind, FakeGroup, PeerDeath, ProcessGroup, ProcessGroupExt, RawWork, ReduceOp,
    Result, State, completion,
};
use phalanx_store::HashStore;

fn init() -> GroupInit {
    GroupInit::new(Arc::new(HashStore::new()), 1, 4)
}

fn fake(init: &GroupInit) -> Result<Arc<dyn ProcessGroup>> {
    Ok(Arc::new(FakeGroup::new(init.rank, init.world_size)))
}

/// A backend that notes its calls and completes barriers when told to.
#[derive(Debug)]
struct Noting {
    fake: FakeGroup,
    cuda: bool,
    notes: Mutex<Vec<String>>,
    barriers: Mutex<Vec<Completer>>,
}

impl Noting {
    fn new(rank: usize, size: usize, cuda: bool) -> Arc<Self> {
        Arc::new(Self {
            fake: FakeGroup::new(rank, size),
            cuda,
            notes: Mutex::default(),
            barriers: Mutex::default(),
        })
    }

    fn note(&self, what: impl Into<String>) {
        self.notes.lock().push(what.into());
    }

    fn finish_barrier(&self, result: Result<Done>) {
        self.barriers.lock().pop().unwrap().complete(result);
    }
}

impl ProcessGroup for Noting {
    fn rank(&self) -> usize {
        self.fake.rank()
    }
    fn size(&self) -> usize {
        self.fake.size()
    }
    fn backend(&self) -> &str {
        "noting"
    }
    fn name(&self) -> &str {
        self.fake.name()
    }
    fn global_ranks(&self) -> &[usize] {
        self.fake.global_ranks()
    }
    fn capabilities(&self) -> Capabilities {
        let mut all = Capabilities::all_on_host();
        if self.cuda {
            (all.cpu, all.cuda) = (false, true);
            all.calls = all.calls.without(CallKind::Gather);
            all.recv_any = false;
            all.on_peer_death = PeerDeath::Timeout;
        } else {
            all.calls = all.calls.without(CallKind::Scatter);
        }
        all
    }
    fn timeout(&self) -> Duration {
        self.fake.timeout()
    }
    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        self.note(call.kind().to_string());
        if let Call::Barrier = call {
            let (completer, work) = completion();
            self.barriers.lock().push(completer);
            return Ok(work);
        }
        self.fake.submit(call, options)
    }
    fn split(&self, ranks: &[usize], _: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.note("split");
        let rank = ranks.iter().position(|&rank| rank == self.rank());
        Ok(rank.map(|rank| Self::new(rank, ranks.len(), self.cuda) as _))
    }
    fn abort(&self, reason: &str) {
        self.note(format!("abort: {reason}"));
    }
    fn shutdown(&self) -> Result<()> {
        self.note("shutdown");
        Ok(())
    }
    fn sequence(&self) -> u64 {
        self.notes.lock().len() as u64
    }
    fn p2p_sequence(&self) -> u64 {
        self.fake.p2p_sequence()
    }
}

fn on_cuda() -> Buffer {
    // SAFETY: no element is ever reached, for there is none.
    unsafe {
        Buffer::from_raw(
            NonNull::<u64>::dangling().cast(),
            DType::F32,
            0,
            Device::Cuda(1),
            0,
            Box::new(()),
        )
    }
}

fn on_host() -> Buffer {
    Buffer::zeroed(DType::F32, 4)
}

fn both() -> (Arc<Noting>, Arc<Noting>, Arc<ByDevice>) {
    let (cpu, cuda) = (Noting::new(1, 4, false), Noting::new(1, 4, true));
    let group = ByDevice::new(cpu.clone(), cuda.clone()).unwrap();
    (cpu, cuda, group)
}

#[test]
fn names_are_found_in_any_case() {
    let registry = Registry::new();
    registry.register("MyNet", fake).unwrap();
    assert_eq!(registry.names(), ["mynet"]);
    let group = registry.create("mYnET", &init()).unwrap();
    assert_eq!((group.rank(), group.size()), (1, 4));
}

#[test]
fn a_name_is_registered_once() {
    let registry = Registry::new();
    registry.register("net", fake).unwrap();
    let err = registry.register("NET", fake).unwrap_err();
    assert!(err.message().contains("already registered"), "{err}");
    assert_eq!(registry.names().len(), 1);
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    let registry = Registry::new();
    let err = registry.create("x", &init()).unwrap_err();
    assert!(err.message().contains("known: none"), "{err}");
    registry.register("b", fake).unwrap();
    registry.register("a", fake).unwrap();
    let err = registry.create("x", &init()).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Invalid);
    assert!(err.message().contains("known: a, b"), "{err}");
}

#[test]
fn the_factory_gets_what_it_was_asked_with_and_its_error_comes_back() {
    let registry = Registry::new();
    registry
        .register("fails", |init: &GroupInit| {
            let told = format!("{} {:?}", init.name, init.timeout);
            Err(Error::new(ErrorKind::Store, told))
        })
        .unwrap();
    let mut init = init();
    init.timeout = Duration::from_secs(3);
    init.name = "mine".into();
    let err = registry.create("fails", &init).unwrap_err();
    assert_eq!((err.kind(), err.message()), (ErrorKind::Store, "mine 3s"));
    init.rank = 4;
    let err = registry.create("fails", &init).unwrap_err();
    assert!(err.message().contains("rank 4 is not in a world of 4"));
}

#[test]
fn the_process_has_a_registry() {
    registry::register("of-the-process", fake).unwrap();
    assert!(registry::names().contains(&"of-the-process".to_owned()));
    assert!(registry::create("of-the-process", &init()).is_ok());
}

#[test]
fn selections_parse_or_say_why_not() {
    let parse = |text: &str| text.parse::<Selection>();
    let by_device = Selection::ByDevice {
        cpu: "native".into(),
        cuda: "nccl".into(),
    };
    assert_eq!(parse(" CUDA:nccl, cpu:Native").unwrap(), by_device);
    assert_eq!(parse("cpu:x").unwrap(), Selection::One("x".into()));
    assert_eq!(parse("cpu:x,cuda:X").unwrap(), Selection::One("x".into()));
    for (text, reason) in [
        ("cpu:a,cpu:b", "duplicate device \"cpu\""),
        ("cpu:a,cuda", "\"cuda\" in the backend selection"),
        ("cpu:a,", "not device:backend"),
        ("a,b", "not device:backend"),
        ("xpu:a", "unknown device \"xpu\""),
        ("cpu:", "not a backend's name"),
        ("cpu:a:b", "not a backend's name"),
        ("", "not a backend's name"),
        ("two words", "not a backend's name"),
    ] {
        let err = parse(text).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Invalid);
        assert!(err.message().contains(reason), "{text:?}: {err}");
    }
}

#[test]
fn two_backends_make_one_group_with_key_spaces_of_their_own() {
    let registry = Registry::new();
    for (name, cuda) in [("host", false), ("device", true)] {
        registry
            .register(name, move |init: &GroupInit| {
                init.store.set("met", name.as_bytes())?;
                Ok(Noting::new(init.rank, init.world_size, cuda))
            })
            .unwrap();
    }
    let init = init();
    let group = registry.create("cpu:host,cuda:device", &init).unwrap();
    assert_eq!(group.backend(), "cpu:noting,cuda:noting");
    let met = |key| init.store.get_for(key, Duration::ZERO).unwrap();
    assert_eq!(met("cpu/met"), b"host");
    assert_eq!(met("cuda/met"), b"device");
    let err = registry.create("cpu:host,cuda:nccl", &init).unwrap_err();
    assert!(err.message().contains("\"nccl\""), "{err}");
}

#[test]
fn calls_go_to_the_backend_of_their_memory() {
    let (cpu, cuda, group) = both();
    group
        .allreduce(on_host(), ReduceOp::Sum)
        .unwrap()
        .wait()
        .unwrap();
    group.broadcast(on_cuda(), 0).unwrap().wait().unwrap();
    let batch = vec![on_cuda(), on_cuda()];
    drop(group.allreduce_coalesced(batch, ReduceOp::Sum).unwrap());
    assert_eq!(*cpu.notes.lock(), ["allreduce"]);
    assert_eq!(*cuda.notes.lock(), ["broadcast", "batch"]);
    assert_eq!(group.sequence(), 3);
    assert!(group.allocate(Device::Cpu, DType::F32, 3).is_ok());
    assert!(group.allocate(Device::Cuda(0), DType::F32, 3).is_err());
}

#[test]
fn what_neither_or_only_the_other_backend_can_do_is_refused() {
    let (cpu, cuda, group) = both();
    let mixed = vec![on_host(), on_cuda()];
    let err = group.allreduce_coalesced(mixed, ReduceOp::Sum).unwrap_err();
    assert!(err.message().contains("both cpu and cuda"), "{err}");
    assert!(group.capabilities().calls.contains(CallKind::Scatter));
    let err = group.scatter(None, on_host(), 0).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Unsupported);
    assert_eq!(
        (err.place().rank, err.place().call),
        (Some(1), Some(CallKind::Scatter))
    );
    let err = group.recv_any(on_cuda(), 0).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Unsupported);
    assert!(cpu.notes.lock().is_empty() && cuda.notes.lock().is_empty());
    let all = group.capabilities();
    assert!(all.cpu && all.cuda && all.recv_any);
    assert_eq!(all.on_peer_death, PeerDeath::Timeout);
}

#[test]
fn a_barrier_waits_for_both_backends() {
    let (cpu, cuda, group) = both();
    let mut work = group.barrier_async().unwrap();
    let status = work.status();
    cuda.finish_barrier(Ok(Done::default()));
    assert!(work.wait_for(Duration::ZERO).unwrap().is_none());
    assert!(!work.is_done() && matches!(status.state(), State::Started));
    let waker = Waker::noop();
    let poll = pin!(&mut work).poll(&mut Context::from_waker(waker));
    assert!(poll.is_pending());
    cpu.finish_barrier(Ok(Done::default()));
    assert!(matches!(status.state(), State::Succeeded));
    assert!(status.times().done.is_some());
    let poll = pin!(&mut work).poll(&mut Context::from_waker(waker));
    assert!(matches!(poll, Poll::Ready(Ok(()))));

    let work = group.barrier_async().unwrap();
    cpu.finish_barrier(Ok(Done::default()));
    cuda.finish_barrier(Err(Error::new(ErrorKind::PeerLost, "gone")));
    assert!(matches!(work.status().state(), State::Failed(_)));
    assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn ends_and_splits_reach_both_backends() {
    let (cpu, cuda, group) = both();
    assert!(group.split(&[0, 2], "even").unwrap().is_none());
    let odd = group.split(&[3, 1], "odd").unwrap().unwrap();
    assert_eq!((odd.rank(), odd.size()), (1, 2));
    assert!(odd.capabilities().cuda);
    group.abort("enough");
    group.shutdown().unwrap();
    for backend in [cpu, cuda] {
        let notes = backend.notes.lock();
        assert_eq!(*notes, ["split", "split", "abort: enough", "shutdown"]);
    }
}

#[test]
fn groups_of_different_ranks_do_not_join() {
    let err = ByDevice::new(Noting::new(0, 4, false), Noting::new(1, 4, true)).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Invalid);
}

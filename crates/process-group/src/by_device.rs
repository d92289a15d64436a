//! One group made of a backend for host memory and one for devices.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use phalanx_store::Deadline;

use crate::buffer::Buffer;
use crate::call::{Call, CallOptions};
use crate::dtype::{DType, Device};
use crate::error::{Error, Result};
use crate::ext::refused;
use crate::group::{Capabilities, PeerDeath, ProcessGroup};
use crate::work::{Done, Pending, RawWork, State, Status, Times, WorkStatus};

/// A group that hands each call to the backend for the device its memory is on.
///
/// What [`create`](crate::registry::create) makes of `cpu:native,cuda:nccl`. Each backend has an
/// order and sequence numbers of its own, which errors show: calls on host memory and on devices
/// do not wait for each other, except in a barrier, which both take part in.
/// [`sequence`](ProcessGroup::sequence) and [`p2p_sequence`](ProcessGroup::p2p_sequence) are the
/// sums. The capabilities are those of both together;
/// what the backend in question lacks is refused when the call is made.
///
/// # Threads
///
/// May be used from many threads, as far as both backends may.
pub struct ByDevice {
    cpu: Arc<dyn ProcessGroup>,
    cuda: Arc<dyn ProcessGroup>,
    backend: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Cpu,
    Cuda,
}

fn kind(device: Device) -> Kind {
    match device {
        Device::Cpu => Kind::Cpu,
        Device::Cuda(_) => Kind::Cuda,
    }
}

impl ByDevice {
    /// Joins two groups of the same ranks.
    pub fn new(cpu: Arc<dyn ProcessGroup>, cuda: Arc<dyn ProcessGroup>) -> Result<Arc<Self>> {
        if (cpu.rank(), cpu.global_ranks()) != (cuda.rank(), cuda.global_ranks()) {
            return Err(Error::invalid("the groups for cpu and cuda differ in rank"));
        }
        let backend = format!("cpu:{},cuda:{}", cpu.backend(), cuda.backend());
        Ok(Arc::new(Self { cpu, cuda, backend }))
    }

    fn backend_for(&self, device: Kind) -> &Arc<dyn ProcessGroup> {
        match device {
            Kind::Cpu => &self.cpu,
            Kind::Cuda => &self.cuda,
        }
    }

    fn barrier(&self, options: &CallOptions) -> Result<RawWork> {
        // A blocking barrier would keep this rank out of the other one meanwhile, while peers may
        // be in that one first.
        let options = CallOptions {
            mode: crate::Mode::Async,
            ..options.clone()
        };
        let cpu = self.cpu.submit(Call::Barrier, &options)?;
        let cuda = self.cuda.submit(Call::Barrier, &options)?;
        Ok(RawWork::custom(Box::new(Both {
            status: Arc::new(BothStatus([cpu.status(), cuda.status()])),
            works: vec![cpu, cuda],
        })))
    }
}

/// The one kind of device that a call works on; `None` for a barrier.
fn device_of(call: &Call) -> Result<Option<Kind>> {
    let Call::Batch(calls) = call else {
        return Ok(call.device().map(kind));
    };
    let mut kinds = calls.iter().filter_map(Call::device).map(kind);
    let first = kinds.next();
    match kinds.all(|kind| Some(kind) == first) {
        true => Ok(first),
        false => Err(Error::invalid("a batch has calls on both cpu and cuda")),
    }
}

impl ProcessGroup for ByDevice {
    fn rank(&self) -> usize {
        self.cpu.rank()
    }

    fn size(&self) -> usize {
        self.cpu.size()
    }

    fn backend(&self) -> &str {
        &self.backend
    }

    fn name(&self) -> &str {
        self.cpu.name()
    }

    fn global_ranks(&self) -> &[usize] {
        self.cpu.global_ranks()
    }

    fn capabilities(&self) -> Capabilities {
        let (cpu, cuda) = (self.cpu.capabilities(), self.cuda.capabilities());
        let worst = [PeerDeath::JobEnds, PeerDeath::Timeout]
            .into_iter()
            .find(|worst| [cpu.on_peer_death, cuda.on_peer_death].contains(worst));
        Capabilities {
            calls: cpu.calls.union(cuda.calls),
            dtypes: cpu.dtypes.union(cuda.dtypes),
            ops: cpu.ops.union(cuda.ops),
            lacks: &[],
            cpu: cpu.cpu,
            cuda: cuda.cuda,
            recv_any: cpu.recv_any || cuda.recv_any,
            tags: cpu.tags || cuda.tags,
            fixed_order: cpu.fixed_order && cuda.fixed_order,
            scattered: cpu.scattered,
            asynchronous: cpu.asynchronous && cuda.asynchronous,
            abort: cpu.abort && cuda.abort,
            on_peer_death: worst.unwrap_or(PeerDeath::Error),
        }
    }

    fn timeout(&self) -> Duration {
        self.cpu.timeout().max(self.cuda.timeout())
    }

    /// That of the backend for CUDA memory: every rank has the host.
    fn device(&self) -> Device {
        self.cuda.device()
    }

    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        self.backend_for(kind(device)).allocate(device, dtype, len)
    }

    fn copy(&self, from: &Buffer, range: Range<usize>, to: &mut Buffer, at: usize) -> Result<()> {
        // The backend for devices also knows the way to and from the host.
        let device = match (kind(from.device()), kind(to.device())) {
            (Kind::Cpu, Kind::Cpu) => Kind::Cpu,
            _ => Kind::Cuda,
        };
        self.backend_for(device).copy(from, range, to, at)
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let group = match device_of(&call) {
            Ok(None) => return self.barrier(options),
            Ok(Some(device)) => self.backend_for(device),
            Err(err) => return Err(err.at(refused(self, &call))),
        };
        match group.capabilities().check(&call) {
            Ok(()) => group.submit(call, options),
            Err(err) => Err(err.at(refused(self, &call))),
        }
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let cpu = self.cpu.split(ranks, name)?;
        let cuda = self.cuda.split(ranks, name)?;
        match (cpu, cuda) {
            (Some(cpu), Some(cuda)) => Ok(Some(Self::new(cpu, cuda)?)),
            _ => Ok(None),
        }
    }

    fn abort(&self, reason: &str) {
        self.cpu.abort(reason);
        self.cuda.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        let cpu = self.cpu.shutdown();
        self.cuda.shutdown().and(cpu)
    }

    fn sequence(&self) -> u64 {
        self.cpu.sequence() + self.cuda.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.cpu.p2p_sequence() + self.cuda.p2p_sequence()
    }
}

impl fmt::Debug for ByDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ByDevice({:?}, {:?})", self.cpu, self.cuda)
    }
}

/// Two operations that are finished when both are.
struct Both {
    works: Vec<RawWork>,
    status: Arc<BothStatus>,
}

struct BothStatus([WorkStatus; 2]);

impl Pending for Both {
    fn is_done(&self) -> bool {
        self.works.iter().all(RawWork::is_done)
    }

    fn order(&mut self) -> Result<Done> {
        for work in self.works.drain(..) {
            work.wait()?;
        }
        Ok(Done::default())
    }

    fn block(&mut self, limit: Duration) -> Option<Result<Done>> {
        let deadline = Deadline::after(limit);
        while let Some(work) = self.works.last_mut() {
            let result = work.block(deadline.left())?;
            self.works.pop();
            if let Err(err) = result {
                return Some(Err(err));
            }
        }
        Some(Ok(Done::default()))
    }

    fn wake_by(&mut self, waker: &Waker) {
        self.works.iter_mut().for_each(|work| work.wake_by(waker));
    }

    fn status(&self) -> WorkStatus {
        WorkStatus::custom(Arc::clone(&self.status) as _)
    }
}

impl Status for BothStatus {
    fn state(&self) -> State {
        let states = self.0.each_ref().map(WorkStatus::state);
        if let Some(failed) = states.iter().find(|s| matches!(s, State::Failed(_))) {
            return failed.clone();
        }
        match states {
            [State::Succeeded, State::Succeeded] => State::Succeeded,
            [State::Enqueued, State::Enqueued] => State::Enqueued,
            _ => State::Started,
        }
    }

    fn times(&self) -> Times {
        let [mut times, other] = self.0.each_ref().map(WorkStatus::times);
        times.started = match (times.started, other.started) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        times.done = times.done.zip(other.done).map(|(a, b)| a.max(b));
        times.arrivals.extend(other.arrivals);
        times
    }
}

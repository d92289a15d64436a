//! A group on device memory, seen as one on host memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use phalanx_pg::{
    Buffer, Call, CallOptions, Capabilities, DType, Device, Done, Frozen, Payload, Pending,
    ProcessGroup, RawWork, Result, State, WorkStatus,
};

/// Runs every call on copies of its buffers in device memory, and copies the results back: how
/// the suite, whose buffers are in host memory, tests a backend for devices.
///
/// A copy to the device is put on the stream right before the call, and a result is copied back
/// right after `wait`: a backend that does not order its own streams by them computes with the
/// wrong values. Every other copy lies in the middle of a larger allocation.
#[derive(Debug)]
pub struct OnDevice {
    inner: Arc<dyn ProcessGroup>,
    device: Device,
    copies: AtomicUsize,
}

impl OnDevice {
    /// Puts `inner`'s calls on `device`.
    pub fn new(inner: Arc<dyn ProcessGroup>, device: Device) -> Self {
        Self {
            inner,
            device,
            copies: AtomicUsize::new(0),
        }
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        let (dtype, len) = (host.dtype(), host.len());
        let mut copy = match self.copies.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => self.inner.allocate(self.device, dtype, len)?,
            _ => {
                let larger = self.inner.allocate(self.device, dtype, len + 2)?;
                larger.split_at(1).1.split_at(len).0
            }
        };
        // By way of the device: that copy is not finished when the call is made.
        let mut staged = self.inner.allocate(self.device, dtype, len)?;
        self.inner.copy(host, 0..len, &mut staged, 0)?;
        self.inner.copy(&staged, 0..len, &mut copy, 0)?;
        Ok(copy)
    }

    /// Its memory is not needed any more when this returns.
    fn upload_frozen(&self, host: Frozen) -> Result<Frozen> {
        self.upload(&host).map(Buffer::freeze)
    }

    /// The call on device memory, and the host memory that its results go to.
    fn translate(&self, call: Call) -> Result<(Call, Homes)> {
        let in_place = |buf: Buffer| -> Result<(Buffer, Homes)> {
            Ok((self.upload(&buf)?, Homes::One(Some(buf))))
        };
        Ok(match call {
            Call::AllReduce { buf, op } => {
                let (buf, home) = in_place(buf)?;
                (Call::AllReduce { buf, op }, home)
            }
            Call::Reduce { buf, op, root } => {
                let (buf, home) = in_place(buf)?;
                (Call::Reduce { buf, op, root }, home)
            }
            Call::Broadcast { data, root } => {
                let (data, home) = match data {
                    Payload::Writable(buf) => {
                        let (buf, home) = in_place(buf)?;
                        (buf.into(), home)
                    }
                    Payload::ReadOnly(data) => (self.upload_frozen(data)?.into(), Homes::One(None)),
                };
                (Call::Broadcast { data, root }, home)
            }
            Call::AllGather { input, output } => {
                let (output, home) = in_place(output)?;
                let input = self.upload_frozen(input)?;
                (Call::AllGather { input, output }, home)
            }
            Call::Gather {
                input,
                output,
                root,
            } => {
                let input = self.upload_frozen(input)?;
                let (output, home) = match output {
                    Some(output) => {
                        let (output, home) = in_place(output)?;
                        (Some(output), home)
                    }
                    None => (None, Homes::One(None)),
                };
                (
                    Call::Gather {
                        input,
                        output,
                        root,
                    },
                    home,
                )
            }
            Call::Scatter {
                input,
                output,
                root,
            } => {
                let input = input.map(|input| self.upload_frozen(input)).transpose()?;
                let (output, home) = in_place(output)?;
                (
                    Call::Scatter {
                        input,
                        output,
                        root,
                    },
                    home,
                )
            }
            Call::ReduceScatter { input, output, op } => {
                let (output, home) = in_place(output)?;
                let input = self.upload_frozen(input)?;
                (Call::ReduceScatter { input, output, op }, home)
            }
            Call::AllToAll {
                input,
                output,
                send_counts,
                recv_counts,
            } => {
                let (output, home) = in_place(output)?;
                let call = Call::AllToAll {
                    input: self.upload_frozen(input)?,
                    output,
                    send_counts,
                    recv_counts,
                };
                (call, home)
            }
            Call::Send { data, peer, tag } => {
                let data = self.upload_frozen(data)?;
                (Call::Send { data, peer, tag }, Homes::One(None))
            }
            Call::Recv { buf, peer, tag } => {
                let (buf, home) = in_place(buf)?;
                (Call::Recv { buf, peer, tag }, home)
            }
            Call::Batch(calls) => {
                let pairs: Result<Vec<_>> = calls.into_iter().map(|c| self.translate(c)).collect();
                let (calls, homes) = pairs?.into_iter().unzip();
                (Call::Batch(calls), Homes::Many(homes))
            }
            other => (other, Homes::One(None)),
        })
    }
}

/// Where results go.
enum Homes {
    One(Option<Buffer>),
    Many(Vec<Homes>),
}

/// Copies results to the host.
fn bring_home(group: &dyn ProcessGroup, done: Done, homes: Homes) -> Result<Done> {
    match homes {
        Homes::One(None) => Ok(Done {
            buffer: None,
            ..done
        }),
        Homes::One(Some(mut home)) => {
            if let Some(buffer) = &done.buffer {
                group.copy(buffer, 0..buffer.len(), &mut home, 0)?;
            }
            Ok(Done {
                buffer: Some(home),
                ..done
            })
        }
        Homes::Many(homes) => {
            let parts = done.parts.into_iter().zip(homes);
            let parts: Result<Vec<Done>> = parts
                .map(|(done, home)| bring_home(group, done, home))
                .collect();
            Ok(Done {
                parts: parts?,
                ..Done::default()
            })
        }
    }
}

impl ProcessGroup for OnDevice {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn backend(&self) -> &str {
        self.inner.backend()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn capabilities(&self) -> Capabilities {
        let mut known = self.inner.capabilities();
        known.cpu = true;
        known
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn device(&self) -> Device {
        self.inner.device()
    }

    fn allocate(&self, device: Device, dtype: DType, len: usize) -> Result<Buffer> {
        match device {
            Device::Cpu => Ok(Buffer::zeroed(dtype, len)),
            device => self.inner.allocate(device, dtype, len),
        }
    }

    fn copy(&self, from: &Buffer, range: Range<usize>, to: &mut Buffer, at: usize) -> Result<()> {
        self.inner.copy(from, range, to, at)
    }

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let (call, homes) = self.translate(call)?;
        let work = self.inner.submit(call, options)?;
        Ok(RawWork::custom(Box::new(Returning {
            status: work.status(),
            work: Some(work),
            homes: Some(homes),
            group: Arc::clone(&self.inner),
        })))
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let group = self.inner.split(ranks, name)?;
        Ok(group.map(|group| Arc::new(Self::new(group, self.device)) as _))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        self.inner.shutdown()
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }
}

/// An operation whose results have to be copied.
struct Returning {
    status: WorkStatus,
    work: Option<RawWork>,
    homes: Option<Homes>,
    group: Arc<dyn ProcessGroup>,
}

impl Returning {
    fn finish(&mut self, done: Result<Done>) -> Result<Done> {
        let homes = self.homes.take().expect("a result is handed out once");
        let done = bring_home(&*self.group, done?, homes);
        // What `wait` hands over is still under way on the device; now it has come to the host,
        // and how the operation ended is known.
        match self.status.state() {
            State::Failed(err) => Err(err),
            _ => done,
        }
    }
}

const TAKEN: &str = "present until the result is handed out";

impl Pending for Returning {
    fn is_done(&self) -> bool {
        self.work.as_ref().is_none_or(RawWork::is_done)
    }

    fn order(&mut self) -> Result<Done> {
        let done = self.work.take().expect(TAKEN).wait();
        self.finish(done)
    }

    fn block(&mut self, limit: Duration) -> Option<Result<Done>> {
        let done = self.work.as_mut().expect(TAKEN).block(limit)?;
        Some(self.finish(done))
    }

    fn wake_by(&mut self, waker: &Waker) {
        if let Some(work) = &mut self.work {
            work.wake_by(waker);
        }
    }

    fn status(&self) -> WorkStatus {
        self.status.clone()
    }
}

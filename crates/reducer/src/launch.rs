//! Buckets on their way: started in the order of their indices, whatever order they fill in.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use parking_lot::Mutex;
use phalanx_pg::{Buffer, ProcessGroupExt, State, Work, WorkStatus};

use crate::bucket::{Content, Filling, Piece};
use crate::error::{Error, Result};
use crate::hook::GradBucket;
use crate::lane::{Cargo, Delivered, Job, Lane, Reply};
use crate::layout::Layout;
use crate::pass::Running;
use crate::reduced::Landed;
use crate::stats::{BucketTimes, Clock};

/// Starts buckets and collects their results.
pub(crate) struct Launcher {
    lane: Option<Arc<Lane>>,
    hooked: bool,
    flights: Vec<Flight>,
    /// The next bucket to be started: all before it are.
    next: usize,
    /// A bucket could not be started, or the pass has ended without its result. Nothing may be
    /// sent any more: it would meet other ranks' calls one place too early.
    failed: bool,
    replies: (Sender<Reply>, Receiver<Reply>),
}

#[derive(Default)]
struct Flight {
    /// Full, so it may start when its turn comes.
    ready: bool,
    skipped: bool,
    launched: Option<Instant>,
    done: Option<Instant>,
    work: Option<Work<Vec<Buffer>>>,
    /// Which pieces came with their gradients.
    given: Vec<bool>,
    status: Option<WorkStatus>,
    landed: Option<Landed>,
}

impl Launcher {
    pub(crate) fn new(layout: &Layout, lane: Option<Arc<Lane>>, hooked: bool) -> Self {
        Self {
            lane,
            hooked,
            flights: layout.buckets.iter().map(|_| Flight::default()).collect(),
            next: 0,
            failed: false,
            replies: mpsc::channel(),
        }
    }

    /// Starts nothing any more; whether anything was started.
    pub(crate) fn give_up(&mut self) -> bool {
        self.failed = true;
        self.flights.iter().any(|flight| flight.launched.is_some())
    }

    /// A bucket is full: starts all that may start now.
    pub(crate) fn ready(
        &mut self,
        bucket: usize,
        buckets: &[Mutex<Filling>],
        pass: &Running,
    ) -> Result<()> {
        self.flights[bucket].ready = true;
        while !self.failed
            && self
                .flights
                .get(self.next)
                .is_some_and(|flight| flight.ready)
        {
            let index = self.next;
            self.next += 1;
            if !self.flights[index].skipped {
                let content = buckets[index].lock().take();
                let started = self.start(index, content, pass);
                self.failed = started.is_err();
                started?;
            }
        }
        Ok(())
    }

    /// A bucket is not sent, for nobody uses what is in it.
    pub(crate) fn skip(
        &mut self,
        bucket: usize,
        buckets: &[Mutex<Filling>],
        pass: &Running,
    ) -> Result<()> {
        self.flights[bucket].skipped = true;
        self.flights[bucket].landed = Some(Landed::Skipped);
        self.ready(bucket, buckets, pass)
    }

    fn start(&mut self, bucket: usize, content: Content, pass: &Running) -> Result<()> {
        let flight = &mut self.flights[bucket];
        flight.launched = Some(Instant::now());
        let cargo = match content {
            Content::Dense(pieces) if !self.hooked => {
                flight.given = pieces.iter().map(|piece| piece.given).collect();
                let op = pass.operator(bucket);
                let mut pieces: Vec<Buffer> =
                    pieces.into_iter().map(|piece| piece.memory).collect();
                let work = match pieces.len() {
                    1 => pass
                        .group()
                        .allreduce(pieces.remove(0), op)?
                        .map(|buffer| vec![buffer]),
                    _ => pass.group().allreduce_coalesced(pieces, op)?,
                };
                flight.status = Some(work.status());
                flight.work = Some(work);
                return Ok(());
            }
            Content::Dense(pieces) => Cargo::Dense(GradBucket {
                index: bucket,
                is_last: bucket + 1 == self.flights.len(),
                buffer: whole(pieces),
                layout: Arc::clone(pass.layout()),
                params: Arc::clone(pass.params()),
            }),
            Content::Sparse(grad) => Cargo::Sparse {
                param: pass.params()[pass.layout().buckets[bucket].slots[0]].clone(),
                grad,
            },
        };
        let job = Job {
            bucket,
            cargo,
            reply: self.replies.0.clone(),
        };
        let lane = self.lane.as_ref();
        lane.ok_or_else(|| Error::invalid("there is no thread for hooks"))?
            .send(job)
    }

    /// Waits for all buckets, in order.
    pub(crate) fn land(&mut self) -> Result<Vec<Landed>> {
        let mut landed = Vec::with_capacity(self.flights.len());
        for bucket in 0..self.flights.len() {
            if let Some(work) = self.flights[bucket].work.take() {
                let pieces = work.wait()?;
                let flight = &mut self.flights[bucket];
                flight.done = flight
                    .status
                    .as_ref()
                    .and_then(|status| status.times().done);
                let given = std::mem::take(&mut flight.given);
                let pieces = pieces.into_iter().zip(given);
                let pieces = pieces.map(|(memory, given)| Piece {
                    memory: memory.freeze(),
                    given,
                });
                flight.landed = Some(Landed::Dense(pieces.collect()));
            }
            while self.flights[bucket].landed.is_none() {
                self.receive()?;
            }
            // Not kept here: a sink that outlives its pass must not keep memory from being reused.
            landed.extend(self.flights[bucket].landed.take());
        }
        Ok(landed)
    }

    /// Takes one result of the hooks' thread.
    fn receive(&mut self) -> Result<()> {
        // The lane answers every job, and what it runs has time limits.
        let reply = self.replies.1.recv();
        let reply = reply.map_err(|_| Error::invalid("the reducer's thread has ended"))?;
        let flight = &mut self.flights[reply.bucket];
        flight.done = Some(reply.done);
        flight.landed = Some(match reply.result? {
            Delivered::Dense(buffer) => Landed::Dense(vec![Piece {
                memory: buffer.freeze(),
                given: false,
            }]),
            Delivered::Sparse(sparse) => Landed::Sparse(Arc::new(sparse)),
        });
        Ok(())
    }

    /// What was handed over before it had ended, as device memory is.
    pub(crate) fn handed_over(&self) -> Vec<WorkStatus> {
        let started = self
            .flights
            .iter()
            .filter_map(|flight| flight.status.as_ref());
        let open = started.filter(|status| !matches!(status.state(), State::Succeeded));
        open.cloned().collect()
    }

    pub(crate) fn timeline(
        &self,
        clock: &Clock,
        sizes: &[usize],
        ready: &[Instant],
    ) -> Vec<BucketTimes> {
        let flights = self.flights.iter().enumerate();
        let times = flights.map(|(bucket, flight)| BucketTimes {
            bucket,
            bytes: sizes[bucket],
            ready_ns: clock.since_begin(ready[bucket]),
            launched_ns: flight.launched.map(|at| clock.since_begin(at)),
            done_ns: flight.done.map(|at| clock.since_begin(at)),
        });
        times.collect()
    }
}

/// The memory of a bucket for hooks, which is in one piece.
fn whole(mut pieces: Vec<Piece<Buffer>>) -> Buffer {
    debug_assert_eq!(pieces.len(), 1, "with a hook no gradient is alone");
    pieces.remove(0).memory
}

//! Messages on their way, with the memory that they need.

use std::ffi::c_int;
use std::mem::{ManuallyDrop, MaybeUninit};

use mpi::ffi;
use phalanx_pg::{Error, ErrorKind, Result};

use crate::comm::{Comm, MAX_COUNT, number};
use crate::library::{check, enter, error_class};

/// From whom: one rank or any.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Rank(usize),
    Anybody,
}

/// What became of a message that was received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) from: usize,
    pub(crate) bytes: usize,
}

/// Messages in progress, and what they are read from and written to.
///
/// MPI cannot be made to let go of memory. So memory comes back when all messages are through,
/// and if that is not waited for it is never freed.
pub(crate) struct Flight<M> {
    requests: Vec<ffi::MPI_Request>,
    statuses: Vec<MaybeUninit<ffi::MPI_Status>>,
    /// Those that were through when MPI said that something is wrong, while others were not: it
    /// says nothing more about them.
    early: Vec<Early>,
    landed: bool,
    memory: ManuallyDrop<M>,
}

/// A message that was through before others.
struct Early {
    /// The number of its start.
    message: usize,
    status: ffi::MPI_Status,
    /// It was longer than the room for it.
    cut_off: bool,
}

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE, so any thread may ask for a request; the handles are
// plain values, and one thread at a time has the flight.
unsafe impl<M: Send> Send for Flight<M> {}

impl<M> Flight<M> {
    pub(crate) fn new(memory: M) -> Self {
        Self {
            requests: Vec::new(),
            statuses: Vec::new(),
            early: Vec::new(),
            landed: true,
            memory: ManuallyDrop::new(memory),
        }
    }

    /// A look at the memory, to find the bytes for messages in it.
    ///
    /// # Panics
    ///
    /// If messages are on their way: MPI may write to it then.
    pub(crate) fn with_memory<T>(&mut self, look: impl FnOnce(&mut M) -> T) -> T {
        assert!(self.landed, "messages are on their way");
        look(&mut self.memory)
    }

    /// Starts to send. Long messages go in pieces.
    ///
    /// # Safety
    ///
    /// `len` bytes at `bytes` must belong to the memory of the flight, be readable, and stay where
    /// they are when it moves.
    pub(crate) unsafe fn send(
        &mut self,
        comm: &Comm,
        (bytes, len): (*const u8, usize),
        to: usize,
        tag: c_int,
    ) -> Result<()> {
        let _inside = enter()?;
        for start in pieces(len) {
            let count = number(MAX_COUNT.min(len - start));
            let mut request = MaybeUninit::uninit();
            // SAFETY: the bytes are the flight's, which keeps them until the request is through.
            check("MPI_Isend", unsafe {
                let from = bytes.add(start).cast();
                let (byte, to) = (ffi::RSMPI_UINT8_T, number(to));
                ffi::MPI_Isend(from, count, byte, to, tag, comm.raw(), request.as_mut_ptr())
            })?;
            // SAFETY: MPI says that it made it.
            self.add(unsafe { request.assume_init() });
        }
        Ok(())
    }

    /// Starts to receive up to `len` bytes.
    ///
    /// # Safety
    ///
    /// As for [`send`](Flight::send), and the bytes must be writable and nobody else's.
    pub(crate) unsafe fn recv(
        &mut self,
        comm: &Comm,
        (bytes, len): (*mut u8, usize),
        from: Source,
        tag: c_int,
    ) -> Result<()> {
        let _inside = enter()?;
        let source = match from {
            Source::Rank(rank) => number(rank),
            // SAFETY: a constant of the library's.
            Source::Anybody => unsafe { ffi::RSMPI_ANY_SOURCE },
        };
        for start in pieces(len) {
            let count = number(MAX_COUNT.min(len - start));
            let mut request = MaybeUninit::uninit();
            // SAFETY: the bytes are the flight's, which keeps them until the request is through.
            check("MPI_Irecv", unsafe {
                let (to, byte) = (bytes.add(start).cast(), ffi::RSMPI_UINT8_T);
                ffi::MPI_Irecv(
                    to,
                    count,
                    byte,
                    source,
                    tag,
                    comm.raw(),
                    request.as_mut_ptr(),
                )
            })?;
            // SAFETY: MPI says that it made it.
            self.add(unsafe { request.assume_init() });
        }
        Ok(())
    }

    fn add(&mut self, request: ffi::MPI_Request) {
        self.requests.push(request);
        self.statuses.push(MaybeUninit::uninit());
        self.landed = false;
    }

    /// Whether all messages are through.
    pub(crate) fn test(&mut self) -> Result<bool> {
        if self.landed {
            return Ok(true);
        }
        let _inside = enter()?;
        let mut done = 0;
        // SAFETY: as many requests as said, all of this flight, and room for as many statuses.
        let code = unsafe {
            let (count, requests) = (number(self.requests.len()), self.requests.as_mut_ptr());
            let statuses = self.statuses.as_mut_ptr().cast();
            ffi::MPI_Testall(count, requests, &raw mut done, statuses)
        };
        self.landed = match check("MPI_Testall", code) {
            Ok(()) => done != 0,
            Err(_) if error_class(code) == ffi::MPI_ERR_IN_STATUS => self.sort_out()?,
            Err(err) => return Err(err),
        };
        Ok(self.landed)
    }

    /// What is wrong, when MPI says that something is: a message that was too long has come all the
    /// same. Whether all are through.
    fn sort_out(&mut self) -> Result<bool> {
        let mut through = true;
        for (message, status) in self.statuses.iter().enumerate() {
            if self.early.iter().any(|early| early.message == message) {
                continue;
            }
            // SAFETY: MPI has written all of them when it says to look there.
            let status = unsafe { *status.assume_init_ref() };
            let cut_off = match error_class(status.MPI_ERROR) {
                ffi::MPI_ERR_PENDING => {
                    through = false;
                    continue;
                }
                ffi::MPI_ERR_TRUNCATE => true,
                _ => check("MPI_Testall", status.MPI_ERROR).map(|()| false)?,
            };
            self.early.push(Early {
                message,
                status,
                cut_off,
            });
        }
        Ok(through)
    }

    /// What came with a message that was received, by the number of its start; an error if it was
    /// longer than the room for it.
    ///
    /// # Panics
    ///
    /// If not all messages are through.
    pub(crate) fn arrival(&self, message: usize) -> Result<Arrival> {
        assert!(self.landed, "messages are on their way");
        let mut early = self.early.iter();
        let early = early.find(|early| early.message == message);
        let status = match early {
            Some(early) => &early.status,
            // SAFETY: MPI has written it when it said that all are through.
            None => unsafe { self.statuses[message].assume_init_ref() },
        };
        let from = usize::try_from(status.MPI_SOURCE).unwrap_or(usize::MAX);
        if early.is_some_and(|early| early.cut_off) {
            let what = format!("rank {from} sent more than there is room for");
            return Err(Error::new(ErrorKind::Mismatch, what).from_peer(from));
        }
        let mut bytes = 0;
        // SAFETY: a status of MPI's.
        check("MPI_Get_count", unsafe {
            ffi::MPI_Get_count(&raw const *status, ffi::RSMPI_UINT8_T, &raw mut bytes)
        })?;
        Ok(Arrival {
            from,
            bytes: usize::try_from(bytes).unwrap_or(0),
        })
    }

    /// How many messages were started.
    pub(crate) fn messages(&self) -> usize {
        self.requests.len()
    }

    /// The memory.
    ///
    /// # Panics
    ///
    /// If not all messages are through.
    pub(crate) fn land(mut self) -> M {
        assert!(self.landed, "messages are on their way");
        // SAFETY: taken once: the flight ends here, without its drop.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        // Its vectors.
        drop(std::mem::take(&mut self.requests));
        drop(std::mem::take(&mut self.statuses));
        drop(std::mem::take(&mut self.early));
        std::mem::forget(self);
        memory
    }
}

impl<M> Drop for Flight<M> {
    fn drop(&mut self) {
        if self.landed {
            // SAFETY: nothing uses it any more, and it is not touched afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// Where the pieces of a message begin; one that is empty has one.
fn pieces(len: usize) -> impl Iterator<Item = usize> {
    (0..len.max(1)).step_by(MAX_COUNT)
}

/// Takes one message off a communicator, if one is there: from whom, and what.
pub(crate) fn take(comm: &Comm, tag: c_int) -> Result<Option<(usize, Vec<u8>)>> {
    let _inside = enter()?;
    let mut found = 0;
    let mut message = MaybeUninit::uninit();
    let mut status = MaybeUninit::uninit();
    // SAFETY: room for one of each, which are read only if MPI says that it found a message; that
    // is then this thread's alone, and the memory is as long as it.
    unsafe {
        let any = ffi::RSMPI_ANY_SOURCE;
        let (found, at) = (&raw mut found, message.as_mut_ptr());
        let probed = ffi::MPI_Improbe(any, tag, comm.raw(), found, at, status.as_mut_ptr());
        check("MPI_Improbe", probed)?;
        if *found == 0 {
            return Ok(None);
        }
        let status: ffi::MPI_Status = status.assume_init();
        let mut count = 0;
        let byte = ffi::RSMPI_UINT8_T;
        let counted = ffi::MPI_Get_count(&raw const status, byte, &raw mut count);
        check("MPI_Get_count", counted)?;
        let mut bytes = vec![0u8; usize::try_from(count).unwrap_or(0)];
        let (to, ignore) = (bytes.as_mut_ptr().cast(), ffi::RSMPI_STATUS_IGNORE);
        check("MPI_Mrecv", ffi::MPI_Mrecv(to, count, byte, at, ignore))?;
        Ok(Some((
            usize::try_from(status.MPI_SOURCE).unwrap_or(0),
            bytes,
        )))
    }
}

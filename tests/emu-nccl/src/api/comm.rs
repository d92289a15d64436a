//! Making, asking and ending communicators.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use nccl_sys::*;

use super::{answer, give};
use crate::comm::{self, Comm, find, join};
use crate::last_error::fail;
use crate::wire::What;

/// Whether a communicator made with this configuration blocks.
fn blocks(config: *const ncclConfig_t) -> Result<bool, ncclResult_t> {
    if config.is_null() {
        return Ok(true);
    }
    // SAFETY: by NCCL's contract a configuration, of which the first fields are of every version.
    let (magic, blocking) = unsafe { ((*config).magic, (*config).blocking) };
    match magic == NCCL_API_MAGIC {
        true => Ok(blocking != 0),
        false => Err(fail(
            ncclInvalidArgument,
            "the configuration is not initialised",
        )),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRank(
    out: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    join(out, ranks, id, rank, true)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    out: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    answer(|| Ok(join(out, ranks, id, rank, blocks(config)?)))
}

/// With several ids the first serves all.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankScalable(
    out: *mut ncclComm_t,
    ranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    answer(|| {
        if ids.is_null() || count < 1 {
            return Err(fail(ncclInvalidArgument, "no unique id"));
        }
        // SAFETY: not null, and by NCCL's contract at least one id.
        let id = unsafe { ids.read() };
        Ok(join(out, ranks, id, rank, blocks(config)?))
    })
}

/// One process with several devices is nothing that the backend does.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(
    _comms: *mut ncclComm_t,
    _count: c_int,
    _devices: *const c_int,
) -> ncclResult_t {
    fail(ncclInvalidUsage, "the emulator has no ncclCommInitAll")
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(comm: ncclComm_t, code: *mut ncclResult_t) -> ncclResult_t {
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        give(code, comm.state())
    })
}

fn tell(comm: ncclComm_t, out: *mut c_int, what: impl Fn(&Comm) -> c_int) -> ncclResult_t {
    answer(|| give(out, what(&*find(comm)?)))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCount(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
    tell(comm, out, |comm| comm.ranks() as c_int)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommUserRank(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
    tell(comm, out, |comm| comm.rank() as c_int)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCuDevice(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
    tell(comm, out, |comm| comm.device)
}

/// Ends when all ranks have called it, so that no rank's hub goes while others need it.
#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclSuccess;
    }
    answer(|| {
        let comm = find(comm)?;
        let _inside = comm.enter()?;
        Ok(comm.proceed(|comm| comm.outcome(&comm.ask(What::Finalize, Vec::new()))))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclSuccess;
    }
    answer(|| {
        find(comm)?;
        comm::forget(comm);
        Ok(ncclSuccess)
    })
}

/// The one call that may run beside another one of the same communicator.
#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    if comm.is_null() {
        return ncclSuccess;
    }
    answer(|| {
        find(comm)?.abort();
        comm::forget(comm);
        Ok(ncclSuccess)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    parent: ncclComm_t,
    color: c_int,
    key: c_int,
    out: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    answer(|| {
        let parent = find(parent)?;
        let _inside = parent.enter()?;
        let blocking = match config.is_null() {
            true => parent.blocking,
            false => blocks(config)?,
        };
        let id = comm::new_id()?.to_bytes().to_vec();
        let ask = move |parent: &Comm| parent.ask(What::Split { color, key }, id);
        if color == NCCL_SPLIT_NOCOLOR {
            give(out, ptr::null_mut())?;
            return Ok(parent.proceed(move |parent| parent.outcome(&ask(parent))));
        }
        // Who it is in the new communicator is known when all ranks have called.
        let child = Comm::new(0, 0, parent.device, blocking);
        give(out, child.handle())?;
        let parent = Arc::clone(&parent);
        Ok(child.proceed(move |child| match ask(&parent) {
            Ok(place) => child.take_place(&place),
            failed => child.outcome(&failed),
        }))
    })
}

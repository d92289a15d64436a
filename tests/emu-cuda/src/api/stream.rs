//! Streams and events.

use std::ffi::{c_int, c_uint, c_void};

use crate::code::{INVALID_VALUE, NOT_SUPPORTED, answer};
use crate::context::{self, EVENTS, STREAMS, primary};
use crate::event::Event;
use crate::stream::Stream;

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> c_int {
    cuStreamCreateWithPriority(stream, flags, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreateWithPriority(
    stream: *mut *mut c_void,
    flags: c_uint,
    priority: c_int,
) -> c_int {
    answer(|| {
        let context = context::current()?;
        let new = Stream::start(context.device, flags, priority);
        context.add(&new);
        give!(stream, STREAMS.add(new));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    answer(|| {
        let old = STREAMS.remove(stream)?;
        primary(old.device).forget(&old);
        old.destroy();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetPriority(stream: *mut c_void, priority: *mut c_int) -> c_int {
    answer(|| {
        give!(priority, context::stream(stream)?.priority);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(stream: *mut c_void, context: *mut *mut c_void) -> c_int {
    answer(|| {
        give!(context, primary(context::stream(stream)?.device).handle());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    answer(|| context::stream(stream)?.synchronize())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: *mut c_void) -> c_int {
    answer(|| context::stream(stream)?.query())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) -> c_int {
    answer(|| {
        context::stream(stream)?;
        give!(status, 0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: c_uint) -> c_int {
    answer(|| Err(NOT_SUPPORTED))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> c_int {
    answer(|| {
        let (stream, event) = (context::stream(stream)?, EVENTS.get(event)?);
        if std::env::var_os("EMU_CUDA_IGNORE_WAITS").is_some() {
            return Ok(());
        }
        let mark = event.newest();
        context::enqueue(&stream, move || {
            mark.wait();
            Ok(())
        });
        Ok(())
    })
}

type HostFunction = unsafe extern "C" fn(*mut c_void);

/// What a host function is called with, on its way to the stream's thread.
struct Argument(*mut c_void);

// SAFETY: the driver's contract: the argument is for whatever thread runs the function.
unsafe impl Send for Argument {}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    stream: *mut c_void,
    function: Option<HostFunction>,
    argument: *mut c_void,
) -> c_int {
    answer(|| {
        let stream = context::stream(stream)?;
        let function = function.ok_or(INVALID_VALUE)?;
        let argument = Argument(argument);
        context::enqueue(&stream, move || {
            let Argument(argument) = { argument };
            // SAFETY: the caller gave the function with its argument, to be called once.
            unsafe { function(argument) };
            Ok(())
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) -> c_int {
    answer(|| {
        context::current()?;
        give!(event, EVENTS.add(Event::new(flags)));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    answer(|| EVENTS.remove(event).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    answer(|| {
        let event = EVENTS.get(event)?;
        event.record(&context::stream(stream)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    answer(|| EVENTS.get(event)?.query())
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    answer(|| {
        EVENTS.get(event)?.newest().wait();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(
    milliseconds: *mut f32,
    start: *mut c_void,
    end: *mut c_void,
) -> c_int {
    answer(|| {
        let elapsed = EVENTS.get(start)?.until(&*EVENTS.get(end)?)?;
        give!(milliseconds, elapsed.as_secs_f32() * 1e3);
        Ok(())
    })
}

//! The collectives: who says what to whom, and what is made of it.

use std::ops::Range;

use phalanx::pg::reduce::{Contribution, reduce};
use phalanx::pg::{
    Buffer, Call, Done, Error, ErrorKind, Payload, ReduceOp, Result, Turn, explicit_counts,
};

use crate::room::{Came, Letter, Room};

/// Runs a collective to its end.
pub(crate) fn run(call: Call, room: &Room, turn: &Turn) -> Result<Done> {
    let Call::Batch(calls) = call else {
        return Step { room, turn, part: 0 }.run(call);
    };
    // To the end even if one has the wrong length: the other ranks do the same.
    let mut results = Vec::with_capacity(calls.len());
    for (part, call) in calls.into_iter().enumerate() {
        let result = Step { room, turn, part }.run(call);
        if result.as_ref().is_err_and(|err| !err.leaves_group_usable()) {
            return result;
        }
        results.push(result);
    }
    let parts = results.into_iter().collect::<Result<_>>()?;
    Ok(Done { parts, ..Done::default() })
}

/// One exchange of an operation.
struct Step<'a> {
    room: &'a Room,
    turn: &'a Turn,
    part: usize,
}

/// Which bytes go to, or come from, each rank.
type Parts = Vec<Range<usize>>;

impl Step<'_> {
    fn run(&self, call: Call) -> Result<Done> {
        match call {
            Call::AllReduce { buf, op } => {
                let came = self.reducing(op, &buf, self.to_all(&buf))?;
                combine(op, &came, buf)
            }
            Call::Reduce { buf, op, root } => {
                let came = self.reducing(op, &buf, self.to_one(root, &buf))?;
                match self.is(root) {
                    true => combine(op, &came, buf),
                    false => Ok(buf.into()),
                }
            }
            Call::ReduceScatter { input, output, op } => {
                let came = self.reducing(op, &input, self.equal(output.byte_len()))?;
                combine(op, &came, output)
            }
            Call::Broadcast { data, root } => {
                let parts = match self.is(root) {
                    true => self.to_all(data.buffer()),
                    false => self.to_nobody(),
                };
                let came = self.exchange(data.buffer().as_bytes()?, parts, 1.0)?;
                match data {
                    Payload::Writable(buf) => line_up(&came, &self.to_one(root, &buf), buf),
                    Payload::ReadOnly(_) => Ok(Done::default()),
                }
            }
            Call::AllGather { input, output } => {
                let came = self.exchange(input.as_bytes()?, self.to_all(&input), 1.0)?;
                line_up(&came, &self.equal(input.byte_len()), output)
            }
            Call::Gather { input, output, root } => {
                let came = self.exchange(input.as_bytes()?, self.to_one(root, &input), 1.0)?;
                match output {
                    Some(output) => line_up(&came, &self.equal(input.byte_len()), output),
                    None => Ok(Done::default()),
                }
            }
            Call::Scatter { input, output, root } => {
                let (bytes, parts) = match &input {
                    Some(input) => (input.as_bytes()?, self.equal(output.byte_len())),
                    None => (&[][..], self.to_nobody()),
                };
                let came = self.exchange(bytes, parts, 1.0)?;
                line_up(&came, &self.to_one(root, &output), output)
            }
            Call::AllToAll { input, output, send_counts, recv_counts } => {
                let parts = self.counted(&send_counts, &input);
                let came = self.exchange(input.as_bytes()?, parts, 1.0)?;
                line_up(&came, &self.counted(&recv_counts, &output), output)
            }
            Call::Barrier => self.exchange(&[], self.to_nobody(), 1.0).map(|_| Done::default()),
            // The capabilities keep the others away; new ones may come.
            other => Err(Error::unsupported(format!("no {} over files", other.kind()))),
        }
    }

    fn exchange(&self, bytes: &[u8], parts: Parts, factor: f64) -> Result<Vec<Came>> {
        self.room.exchange(&Letter { factor, bytes, parts }, self.part, self.turn)
    }

    fn reducing(&self, op: ReduceOp, buf: &Buffer, parts: Parts) -> Result<Vec<Came>> {
        let mine = Contribution::new(op, buf.as_bytes()?);
        self.exchange(mine.bytes, parts, mine.factor)
    }

    fn size(&self) -> usize {
        self.room.members().len()
    }

    fn is(&self, root: usize) -> bool {
        self.room.rank() == root
    }

    fn to_all(&self, buf: &Buffer) -> Parts {
        vec![0..buf.byte_len(); self.size()]
    }

    fn to_one(&self, root: usize, buf: &Buffer) -> Parts {
        let mut parts = self.to_nobody();
        parts[root] = 0..buf.byte_len();
        parts
    }

    fn to_nobody(&self) -> Parts {
        vec![0..0; self.size()]
    }

    fn equal(&self, bytes: usize) -> Parts {
        (0..self.size()).map(|i| i * bytes..(i + 1) * bytes).collect()
    }

    fn counted(&self, counts: &[usize], buf: &Buffer) -> Parts {
        let counts = explicit_counts(counts, buf.len(), self.size()).into_iter();
        let ends = counts.scan(0, |end, count| {
            let start = *end;
            *end += count * buf.dtype().size();
            Some(start..*end)
        });
        ends.collect()
    }
}

/// Reduces in rank order, on every rank the same: that is what makes the bits equal.
fn combine(op: ReduceOp, came: &[Came], mut out: Buffer) -> Result<Done> {
    let mut parts = Vec::with_capacity(came.len());
    for (from, Came { factor, bytes }) in came.iter().enumerate() {
        check_len(from, bytes.len(), out.byte_len())?;
        parts.push(Contribution { bytes, factor: *factor });
    }
    let dtype = out.dtype();
    reduce(op, dtype, &parts, out.as_bytes_mut()?);
    Ok(out.into())
}

fn line_up(came: &[Came], parts: &[Range<usize>], mut out: Buffer) -> Result<Done> {
    let bytes = out.as_bytes_mut()?;
    for (from, (came, part)) in came.iter().zip(parts).enumerate() {
        check_len(from, came.bytes.len(), part.len())?;
        bytes[part.clone()].copy_from_slice(&came.bytes);
    }
    Ok(out.into())
}

/// The exchange is over when lengths are looked at, so the group stays usable.
fn check_len(from: usize, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    let what = format!("rank {from} sent {got} bytes, {expected} were expected");
    Err(Error::new(ErrorKind::Mismatch, what).from_peer(from))
}

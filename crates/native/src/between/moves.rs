//! Calls that only move data.

use phalanx_pg::{Buffer, Call, Done, Error, ErrorKind, Frozen, Payload, Result, explicit_counts};

use super::Job;
use super::wire::{Outgoing, Script};

/// Data that goes to other hosts and comes from them, all known before.
struct Moves<'a> {
    job: &'a Job<'a>,
    sends: Vec<(usize, *const u8, usize)>,
    receives: Vec<Receive>,
}

struct Receive {
    from: usize,
    to: *mut u8,
    bytes: usize,
    /// Where it goes in the neighbours' memory too.
    spread: Option<usize>,
}

impl<'a> Moves<'a> {
    fn new(job: &'a Job<'a>) -> Self {
        Self {
            job,
            sends: Vec::new(),
            receives: Vec::new(),
        }
    }

    fn send(&mut self, to: usize, data: *const u8, bytes: usize) {
        if bytes > 0 {
            self.sends.push((to, data, bytes));
        }
    }

    fn receive(&mut self, from: usize, to: *mut u8, bytes: usize, spread: Option<usize>) {
        if bytes > 0 {
            self.receives.push(Receive {
                from,
                to,
                bytes,
                spread,
            });
        }
    }

    fn run(&mut self) -> Result<()> {
        let job = self.job;
        job.exchange(self)
    }
}

impl Moves<'_> {
    /// What comes from a rank, if anything.
    fn receive_from(&self, from: usize) -> Option<&Receive> {
        self.receives.iter().find(|receive| receive.from == from)
    }
}

impl Script for Moves<'_> {
    fn expected(&self, from: usize) -> usize {
        let cut = self.job.between.cut;
        let receive = self.receive_from(from);
        receive.map_or(0, |receive| cut.pieces(receive.bytes).count())
    }

    fn place(&mut self, from: usize, id: u32, len: usize, _: &mut Outgoing) -> Option<*mut u8> {
        let receive = self.receive_from(from)?;
        let piece = self.job.between.cut.piece(receive.bytes, id);
        (piece.len() == len).then(|| receive.to.wrapping_add(piece.start))
    }

    fn arrived(&mut self, from: usize, id: u32, _: &mut Outgoing) {
        let receive = self.receive_from(from);
        if let Some((offset, bytes)) = receive.and_then(|it| Some((it.spread?, it.bytes))) {
            let piece = self.job.between.cut.piece(bytes, id);
            self.job.spread(offset + piece.start, piece.len());
        }
    }

    fn work(&mut self, out: &mut Outgoing) -> bool {
        let any = !self.sends.is_empty();
        for (to, data, bytes) in self.sends.drain(..) {
            for (id, piece) in self.job.between.cut.pieces(bytes) {
                out.push(to, id, data.wrapping_add(piece.start), piece.len());
            }
        }
        any
    }
}

impl Job<'_> {
    pub(super) fn moves(&self, call: Call) -> Result<Done> {
        match call {
            Call::Broadcast { data, root } => self.broadcast(data, root),
            Call::AllGather { input, output } => self.all_gather(&input, output),
            Call::Gather {
                input,
                output,
                root,
            } => self.gather(input, output, root),
            Call::Scatter {
                input,
                output,
                root,
            } => self.scatter(input, output, root),
            Call::AllToAll {
                input,
                output,
                recv_counts,
                ..
            } => self.all_to_all(input, output, &recv_counts),
            other => {
                let what = format!("native has no collective {}", other.kind());
                Err(Error::unsupported(what))
            }
        }
    }

    /// Crosses to each other host once, in as many parts as the root's host has ranks.
    fn broadcast(&self, data: Payload, root: usize) -> Result<Done> {
        let between = self.between;
        let bytes = data.buffer().byte_len();
        let (root_host, root_place) = between.seat_of(root);
        let senders = between.hosts[root_host].len();
        let part = |sender: usize| (bytes * sender / senders, bytes * (sender + 1) / senders);
        let me = self.local.me();
        let own = self.memory[me];
        let mut moves = Moves::new(self);
        if root_host == between.here {
            if me != root_place {
                self.local.copy(self.memory[root_place], own, bytes);
            }
            let (start, end) = part(me);
            let hosts = 0..between.hosts.len();
            for host in hosts.filter(|&host| host != root_host) {
                let theirs = &between.hosts[host];
                moves.send(
                    theirs[me % theirs.len()],
                    own.wrapping_add(start),
                    end - start,
                );
            }
        } else {
            let ours = self.local.ranks();
            for sender in (0..senders).filter(|sender| sender % ours == me) {
                let (start, end) = part(sender);
                let from = between.hosts[root_host][sender];
                moves.receive(from, own.wrapping_add(start), end - start, Some(start));
            }
        }
        moves.run()?;
        match data {
            Payload::Writable(buffer) => Ok(buffer.into()),
            Payload::ReadOnly(frozen) => {
                self.local.keep(self.current, Some(frozen));
                Ok(Done::default())
            }
        }
    }

    /// Each input crosses to each other host once; who takes it there passes it on.
    fn all_gather(&self, input: &Frozen, output: Buffer) -> Result<Done> {
        let (between, own, me) = (self.between, self.own(), self.local.me());
        let bytes = input.byte_len();
        let from = input.as_ptr().as_ptr();
        let to = output.as_ptr().as_ptr();
        // Into every neighbour's output, since theirs may be read only when they are done.
        for rank in 0..self.local.ranks() {
            let to = self.memory[rank].wrapping_add(own * bytes);
            self.local.copy(from, to, bytes);
        }
        let mut moves = Moves::new(self);
        for host in (0..between.hosts.len()).filter(|&host| host != between.here) {
            moves.send(between.relay(host, own), from, bytes);
        }
        for (rank, _) in between.remote() {
            if between.relay(between.here, rank) == self.local.seat.ranks[me] {
                let at = rank * bytes;
                moves.receive(rank, to.wrapping_add(at), bytes, Some(at));
            }
        }
        moves.run()?;
        Ok(output.into())
    }

    fn gather(&self, input: Frozen, output: Option<Buffer>, root: usize) -> Result<Done> {
        let bytes = input.byte_len();
        let (root_host, _) = self.between.seat_of(root);
        let mut moves = Moves::new(self);
        if let Some(output) = &output {
            let to = output.as_ptr().as_ptr();
            for (rank, _) in self.between.remote() {
                moves.receive(rank, to.wrapping_add(rank * bytes), bytes, None);
            }
            for (place, &rank) in self.local.seat.ranks.iter().enumerate() {
                let from = match place == self.local.me() {
                    true => input.as_ptr().as_ptr(),
                    false => self.memory[place],
                };
                self.local.copy(from, to.wrapping_add(rank * bytes), bytes);
            }
        } else if root_host != self.between.here {
            moves.send(root, input.as_ptr().as_ptr(), bytes);
        }
        moves.run()?;
        self.local.keep(self.current, Some(input));
        Ok(output.map(Done::from).unwrap_or_default())
    }

    fn scatter(&self, input: Option<Frozen>, output: Buffer, root: usize) -> Result<Done> {
        let bytes = output.byte_len();
        let to = output.as_ptr().as_ptr();
        let mut moves = Moves::new(self);
        let (root_host, root_place) = self.between.seat_of(root);
        if let Some(input) = &input {
            let from = input.as_ptr().as_ptr();
            for (rank, _) in self.between.remote() {
                moves.send(rank, from.wrapping_add(rank * bytes), bytes);
            }
            self.local.copy(from.wrapping_add(root * bytes), to, bytes);
        } else if root_host == self.between.here {
            let from = self.memory[root_place].wrapping_add(self.own() * bytes);
            self.local.copy(from, to, bytes);
        } else {
            moves.receive(root, to, bytes, None);
        }
        moves.run()?;
        self.local.keep(self.current, input);
        Ok(output.into())
    }

    fn all_to_all(&self, input: Frozen, output: Buffer, recv_counts: &[usize]) -> Result<Done> {
        let (local, own, ranks) = (self.local, self.own(), self.local.seat.size);
        let (op, size) = (self.current.op, input.dtype().size());
        let expected = explicit_counts(recv_counts, output.len(), ranks);
        let mut moves = Moves::new(self);
        let mut start = 0;
        for rank in 0..ranks {
            let bytes = local.count(local.me(), op, rank) * size;
            if local.local_rank(rank).is_none() {
                moves.send(rank, input.as_ptr().as_ptr().wrapping_add(start), bytes);
            }
            start += bytes;
        }
        let mut at = 0;
        let mut wrong = None;
        for (rank, &count) in expected.iter().enumerate() {
            let to = output.as_ptr().as_ptr().wrapping_add(at);
            at += count * size;
            let Some(place) = local.local_rank(rank) else {
                moves.receive(rank, to, count * size, None);
                continue;
            };
            let sent = local.count(place, op, own);
            let before: usize = (0..own).map(|other| local.count(place, op, other)).sum();
            if sent != count || ((before + sent) as u64) > self.all[place].len {
                wrong.get_or_insert((rank, sent, count));
                continue;
            }
            let from = match place == local.me() {
                true => input.as_ptr().as_ptr().cast_const(),
                false => self.memory[place].cast_const(),
            };
            local.copy(from.wrapping_add(before * size), to, count * size);
        }
        if let Some((rank, sent, room)) = wrong {
            let what = format!("rank {rank} sends {sent} elements, there is room for {room}");
            return Err(Error::new(ErrorKind::Backend, what).from_peer(rank));
        }
        moves.run()?;
        local.keep(self.current, Some(input));
        Ok(output.into())
    }
}

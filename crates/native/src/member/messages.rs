//! Point-to-point calls.

use super::*;

impl Member {
    /// Starts a send, a receive, or a batch of them.
    pub(crate) fn point_to_point(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        let limit = options.timeout.unwrap_or(self.timeout);
        let deadline = Instant::now() + limit.min(Duration::from_secs(1 << 30));
        let room = |calls: &[Call]| {
            if self.messages.outstanding() + calls.len() > MAX_OUTSTANDING {
                let full = format!("{MAX_OUTSTANDING} operations are outstanding, wait for some");
                return Err(Error::new(ErrorKind::QueueFull, full));
            }
            Ok(())
        };
        let (calls, work) = self.messages.issued().issue(call, room)?;
        for (call, part) in calls {
            match call {
                Call::Send { data, peer, tag } => self.send(data, peer, tag, deadline, part),
                Call::Recv { buf, peer, tag } => {
                    let inbound = Inbound {
                        peer,
                        tag,
                        buf,
                        deadline,
                        part,
                    };
                    let answer = self.messages.receive(inbound, &self.fetch());
                    self.post(answer);
                }
                other => {
                    let what = format!("{} is no point-to-point call", other.kind());
                    part.end(Err(Error::invalid(what)));
                }
            }
        }
        self.tell_messages();
        Ok(work)
    }

    /// The group may have broken, or a peer left, before a call was there to be told, or while its
    /// message was being handed over.
    pub(super) fn tell_messages(&self) {
        if let Some(cause) = self.broken() {
            self.messages.fail(&cause);
        }
        for peer in 0..self.size() {
            if self.has_left(peer) {
                self.peer_left(peer);
            }
            if let Some(err) = self.gone[peer].get() {
                self.peer_gone(peer, err.clone());
            }
        }
    }

    pub(super) fn send(&self, data: Frozen, peer: usize, tag: u32, deadline: Instant, part: Part) {
        let bytes = data.byte_len();
        let near = self
            .domain
            .hosts
            .together(self.members[peer], self.domain.rank);
        let eager = bytes <= if near { EAGER_LOCAL } else { EAGER_REMOTE };
        let (data, shared) = match near && !eager {
            true => {
                let data = match self.in_shared_memory(data) {
                    Ok(data) => data,
                    Err(err) => return part.end(Err(err)),
                };
                let block = Block::of(&data, &self.domain.arenas).expect("it is there now");
                let (segment, offset) = block.location();
                let at = (segment, offset + data.offset());
                let mark = block.mark();
                (data, Some((at, mark)))
            }
            false => (data, None),
        };
        let letter = self.messages.send(Outbound {
            peer,
            tag,
            data,
            eager,
            shared,
            deadline,
            part,
        });
        self.post(Some(letter));
    }

    /// The same data where peers on this host can read it.
    pub(super) fn in_shared_memory(&self, data: Frozen) -> Result<Frozen> {
        if Block::of(&data, &self.domain.arenas).is_some() {
            return Ok(data);
        }
        let mut copy = self.domain.arenas.allocate(data.dtype(), data.len())?;
        copy.as_bytes_mut()?.copy_from_slice(data.as_bytes()?);
        Ok(copy.freeze())
    }

    /// Copies what a rank on this host offers.
    pub(super) fn fetch(&self) -> impl Fn(usize, (u32, usize), &mut Buffer) -> bool {
        move |from, (segment, offset), buf| {
            let segment = self.domain.maps.get(self.members[from], segment);
            let from = segment.and_then(|segment| segment.range(offset, buf.byte_len()));
            if let Some(from) = from {
                let to = buf.as_ptr().as_ptr();
                self.local.copy(from, to, buf.byte_len());
            }
            from.is_some()
        }
    }

    pub(super) fn post(&self, letter: Option<Letter>) {
        if let Some((rank, frame)) = letter {
            self.domain.links().send(self.members[rank], frame);
        }
    }

    /// A frame about messages has come.
    pub(crate) fn on_message(&self, from: usize, head: &Head, payload: &[u8]) {
        let result = match head.kind {
            Kind::Message | Kind::Offer => {
                let arrived = self.messages.arrived(from, head, payload, &self.fetch());
                arrived.map(|answer| self.post(answer))
            }
            Kind::Wanted => {
                let pieces = self.messages.wanted(head.a);
                pieces.into_iter().for_each(|piece| self.post(Some(piece)));
                Ok(())
            }
            Kind::Taken => {
                self.messages.sent(head.a);
                Ok(())
            }
            Kind::Piece => self.messages.piece(from, head.a, payload),
            _ => Ok(()),
        };
        if let Err(err) = result {
            self.fail(err);
        }
    }

    /// Looks at the clock, and at what could not be done at once.
    pub(crate) fn look_around(&self, now: Instant) {
        self.end_late_messages(now);
        if self.messages.outstanding() > 0 {
            self.tell_messages();
        }
        if let Some(err) = self.death.get() {
            self.fail_if_idle(err);
        }
    }

    /// Ends messages whose time is up, once the others have been asked whether they are there: the
    /// peer of a message may itself wait for one that is not.
    fn end_late_messages(&self, now: Instant) {
        let mut inquiry = self.inquiry.lock();
        if !self.messages.is_late(now) {
            *inquiry = None;
            return;
        }
        let (ticket, end) = *inquiry.get_or_insert_with(|| (self.ask_all(), now + ANSWER));
        let silent: Vec<usize> = self.silent(ticket).collect();
        if !silent.is_empty() && now < end {
            return;
        }
        *inquiry = None;
        drop(inquiry);
        if let Some((part, err)) = self.messages.late(now, &silent) {
            // In this order: who waits for it may drop the group as soon as it knows, and peers are
            // to hear of the error.
            self.fail(err.clone());
            part.end(Err(err));
        }
    }
}

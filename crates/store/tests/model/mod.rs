//! What a store server does, in the most obvious way: lists are searched, nothing is indexed.

use std::collections::{BTreeMap, VecDeque};

use phalanx_store::table::Table;
use phalanx_store::tcp::wire::{ListOp, NOT_READY, Part, READY, Request, put_bytes};

use crate::requests::{Bytes, Owned};

/// A connection that waits for one key.
struct Waiter {
    conn: usize,
    key: Bytes,
    /// For barriers: how many arrivals it takes.
    arrivals: Option<i64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Event {
    Value,
    Arrival(i64),
    Element,
}

pub(crate) struct Model {
    values: BTreeMap<Bytes, Bytes>,
    queues: BTreeMap<Bytes, VecDeque<Bytes>>,
    /// In the order in which they came.
    waiters: Vec<Waiter>,
    /// Whose `WAIT` or `BARRIER` has been read to its end and not been answered.
    armed: Vec<bool>,
    check: Vec<bool>,
    /// The queue for whose element a connection was woken, until its next request.
    handed: Vec<Option<Bytes>>,
    pub(crate) sent: Vec<Bytes>,
}

impl Model {
    pub(crate) fn new(connections: usize) -> Self {
        Self {
            values: BTreeMap::new(),
            queues: BTreeMap::new(),
            waiters: Vec::new(),
            armed: vec![false; connections],
            check: vec![true; connections],
            handed: vec![None; connections],
            sent: vec![Vec::new(); connections],
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiters.len()
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::default();
        for (key, value) in &self.values {
            table.set(key, value);
        }
        for (key, queue) in &self.queues {
            queue.iter().for_each(|value| table.queue_push(key, value));
        }
        table
    }

    pub(crate) fn leave(&mut self, conn: usize) {
        self.forget(conn);
        self.sent[conn].clear();
        if let Some(queue) = self.handed[conn].take() {
            self.offer(&queue);
        }
    }

    /// False if the server closes the connection.
    pub(crate) fn handle(&mut self, conn: usize, part: Part<'_>) -> bool {
        if let Some(queue) = self.handed[conn].take() {
            let pops = matches!(part, Part::Whole(Request::QueuePop { key }) if *key == *queue);
            if !pops {
                self.offer(&queue);
            }
        }
        match part {
            Part::Whole(Request::Validate { .. }) => {}
            Part::Whole(request) => return self.request(conn, whole_request(request)),
            Part::ListStart(ListOp::Wait) => self.forget(conn),
            Part::ListStart(ListOp::Check) => self.check[conn] = true,
            Part::ListStart(_) => {}
            Part::ListKey(ListOp::Check, key) => self.check[conn] &= self.exists(key),
            Part::ListKey(ListOp::Wait, key) => {
                if !self.exists(key) {
                    self.wait(conn, key, None);
                }
            }
            Part::ListKey(_, key) => self.answer_value(conn, key),
            Part::ListPair(key, value) => self.set(key, value),
            Part::ListEnd(ListOp::Check) => {
                let status = if self.check[conn] { READY } else { NOT_READY };
                self.sent[conn].push(status);
            }
            Part::ListEnd(ListOp::Wait) => {
                self.armed[conn] = true;
                self.release(conn);
            }
            Part::ListEnd(_) => {}
        }
        true
    }

    fn request(&mut self, conn: usize, request: Owned) -> bool {
        match request {
            Owned::Set(key, value) => self.set(&key, &value),
            Owned::Get(key) => self.answer_value(conn, &key),
            Owned::CompareSet(key, expected, desired) => {
                let present = self.values.get(&key).cloned();
                let writes = present.as_ref().unwrap_or(&Vec::new()) == &expected;
                let result = match (&present, writes) {
                    (_, true) => desired.clone(),
                    (Some(value), false) => value.clone(),
                    (None, false) => expected,
                };
                if writes {
                    self.set(&key, &desired);
                }
                put_bytes(&mut self.sent[conn], &result);
            }
            Owned::Add(key, delta) => {
                let Some(sum) = self.add(&key, delta) else {
                    return false;
                };
                self.happened(&key, Event::Value);
                self.answer_number(conn, sum);
            }
            Owned::NumKeys => self.answer_number(conn, self.values.len() as i64),
            Owned::DeleteKey(key) => {
                let removed = self.values.remove(&key).is_some();
                self.answer_number(conn, removed.into());
            }
            Owned::Append(key, value) => {
                let old = self.values.get(&key).cloned().unwrap_or_default();
                self.set(&key, &[old, value].concat());
            }
            Owned::CancelWait => {
                self.forget(conn);
                self.sent[conn].push(NOT_READY);
            }
            Owned::Ping(nonce) => self.sent[conn].extend(nonce.to_le_bytes()),
            Owned::QueuePush(key, value) => {
                self.queues.entry(key.clone()).or_default().push_back(value);
                self.happened(&key, Event::Element);
            }
            Owned::QueuePop(key) => {
                self.answer_number(conn, self.queue_len(&key));
                let popped = self.queues.get_mut(&key).and_then(VecDeque::pop_front);
                popped
                    .iter()
                    .for_each(|value| put_bytes(&mut self.sent[conn], value));
            }
            Owned::QueueLen(key) => self.answer_number(conn, self.queue_len(&key)),
            Owned::Barrier(key, world_size) => {
                let Some(count) = self.add(&key, 1) else {
                    return false;
                };
                self.happened(&key, Event::Arrival(count));
                if count >= world_size {
                    self.sent[conn].push(READY);
                } else {
                    self.forget(conn);
                    self.wait(conn, &key, Some(world_size));
                    self.armed[conn] = true;
                }
            }
            other => unreachable!("{other:?} comes in parts or not at all"),
        }
        true
    }

    fn exists(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_len(key) > 0
    }

    fn queue_len(&self, key: &[u8]) -> i64 {
        self.queues.get(key).map_or(0, VecDeque::len) as i64
    }

    fn answer_number(&mut self, conn: usize, number: i64) {
        self.sent[conn].extend(number.to_le_bytes());
    }

    fn answer_value(&mut self, conn: usize, key: &[u8]) {
        let value = self.values.get(key).cloned().unwrap_or_default();
        put_bytes(&mut self.sent[conn], &value);
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.values.insert(key.to_vec(), value.to_vec());
        self.happened(key, Event::Value);
    }

    fn add(&mut self, key: &[u8], delta: i64) -> Option<i64> {
        let old = match self.values.get(key) {
            None => 0,
            Some(value) => std::str::from_utf8(value).ok()?.parse::<i64>().ok()?,
        };
        let sum = old.checked_add(delta)?;
        self.values
            .insert(key.to_vec(), sum.to_string().into_bytes());
        Some(sum)
    }

    fn wait(&mut self, conn: usize, key: &[u8], arrivals: Option<i64>) {
        self.waiters.push(Waiter {
            conn,
            key: key.to_vec(),
            arrivals,
        });
    }

    fn forget(&mut self, conn: usize) {
        self.waiters.retain(|waiter| waiter.conn != conn);
        self.armed[conn] = false;
    }

    /// Answers a wait that has nothing left to wait for; true if it did.
    fn release(&mut self, conn: usize) -> bool {
        let released = self.armed[conn] && self.waiters.iter().all(|w| w.conn != conn);
        if released {
            self.armed[conn] = false;
            self.sent[conn].push(READY);
        }
        released
    }

    /// Lets go whom an event on `key` lets go: all who wait for the key, or one for an element.
    fn happened(&mut self, key: &[u8], event: Event) {
        let concerned = |w: &Waiter| {
            w.key == key
                && match (w.arrivals, event) {
                    (None, _) => true,
                    (Some(needed), Event::Arrival(count)) => needed <= count,
                    (Some(_), _) => false,
                }
        };
        while let Some(i) = self.waiters.iter().position(concerned) {
            let conn = self.waiters.remove(i).conn;
            if self.release(conn) && event == Event::Element {
                self.handed[conn] = Some(key.to_vec());
                return;
            }
        }
    }

    /// An element that somebody was woken for may be anybody's.
    fn offer(&mut self, queue: &[u8]) {
        if self.queue_len(queue) > 0 {
            self.happened(queue, Event::Element);
        }
    }
}

/// A request that is decoded in one piece.
pub(crate) fn whole_request(request: Request<'_>) -> Owned {
    let own = <[u8]>::to_vec;
    match request {
        Request::Set { key, value } => Owned::Set(own(key), own(value)),
        Request::CompareSet {
            key,
            expected,
            desired,
        } => Owned::CompareSet(own(key), own(expected), own(desired)),
        Request::Get { key } => Owned::Get(own(key)),
        Request::Add { key, delta } => Owned::Add(own(key), delta),
        Request::NumKeys => Owned::NumKeys,
        Request::DeleteKey { key } => Owned::DeleteKey(own(key)),
        Request::Append { key, value } => Owned::Append(own(key), own(value)),
        Request::CancelWait => Owned::CancelWait,
        Request::Ping { nonce } => Owned::Ping(nonce),
        Request::QueuePush { key, value } => Owned::QueuePush(own(key), own(value)),
        Request::QueuePop { key } => Owned::QueuePop(own(key)),
        Request::QueueLen { key } => Owned::QueueLen(own(key)),
        Request::ListKeys => Owned::ListKeys,
        Request::Barrier { key, world_size } => Owned::Barrier(own(key), world_size),
        other => unreachable!("{other:?} is a list or a handshake"),
    }
}

/// A request that was decoded element by element.
pub(crate) fn list_request(op: ListOp, elements: Vec<(Bytes, Bytes)>) -> Owned {
    let keys = |pairs: Vec<(Bytes, Bytes)>| pairs.into_iter().map(|(key, _)| key).collect();
    match op {
        ListOp::Check => Owned::Check(keys(elements)),
        ListOp::Wait => Owned::Wait(keys(elements)),
        ListOp::MultiGet => Owned::MultiGet(keys(elements)),
        ListOp::MultiSet => Owned::MultiSet(elements),
    }
}

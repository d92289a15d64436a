//! The data of a store, without anyone waiting for it.
//!
//! One set of rules for `add`, `compare_set`, queues and counting, used by the TCP server, by
//! [`HashStore`](crate::HashStore) and by [`FileStore`](crate::FileStore).

use std::collections::{HashMap, VecDeque};

/// Keys with values, and queues, in name spaces of their own.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
}

/// Why [`Table::add`] refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The present value is not a decimal `i64`.
    #[error("the value is not a decimal 64-bit integer")]
    NotAnInteger,
    /// The sum does not fit.
    #[error("the sum does not fit a 64-bit integer")]
    Overflow,
}

impl Table {
    /// Stores a value; an existing allocation is reused.
    pub fn set(&mut self, key: &[u8], value: &[u8]) {
        match self.values.get_mut(key) {
            Some(slot) if slot.capacity() <= 2 * value.len() + 4096 => {
                slot.clear();
                slot.extend_from_slice(value);
            }
            Some(slot) => *slot = value.to_vec(),
            None => {
                self.values.insert(key.to_vec(), value.to_vec());
            }
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Whether a waiter for `key` may go on: it has a value, or a queue with elements.
    pub fn exists(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_len(key) > 0
    }

    /// Adds to the integer under `key` and returns the sum.
    pub fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, AddError> {
        let Some(value) = self.values.get_mut(key) else {
            self.values
                .insert(key.to_vec(), delta.to_string().into_bytes());
            return Ok(delta);
        };
        let old: i64 = std::str::from_utf8(value)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or(AddError::NotAnInteger)?;
        let sum = old.checked_add(delta).ok_or(AddError::Overflow)?;
        *value = sum.to_string().into_bytes();
        Ok(sum)
    }

    /// Compare-and-set; returns the resulting value. See [`Store::compare_set`](crate::Store).
    pub fn compare_set(&mut self, key: &[u8], expected: &[u8], desired: &[u8]) -> Vec<u8> {
        match self.values.get_mut(key) {
            Some(value) if value == expected => *value = desired.to_vec(),
            Some(value) => return value.clone(),
            None if expected.is_empty() => {
                self.values.insert(key.to_vec(), desired.to_vec());
            }
            None => return expected.to_vec(),
        }
        desired.to_vec()
    }

    /// Appends to a value, creating it if need be.
    pub fn append(&mut self, key: &[u8], value: &[u8]) {
        match self.values.get_mut(key) {
            Some(slot) => slot.extend_from_slice(value),
            None => {
                self.values.insert(key.to_vec(), value.to_vec());
            }
        }
    }

    /// Removes a key; true if it was there.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        self.values.remove(key).is_some()
    }

    /// Number of keys.
    pub fn num_keys(&self) -> usize {
        self.values.len()
    }

    /// All keys.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    /// Appends an element to a queue.
    pub fn queue_push(&mut self, key: &[u8], value: &[u8]) {
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value.to_vec()),
            None => {
                self.queues
                    .insert(key.to_vec(), VecDeque::from([value.to_vec()]));
            }
        }
    }

    /// The oldest element of a queue, which stays in it.
    pub fn queue_front(&self, key: &[u8]) -> Option<&[u8]> {
        self.queues.get(key)?.front().map(Vec::as_slice)
    }

    /// Takes the oldest element of a queue. An emptied queue leaves nothing behind.
    pub fn queue_pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        value
    }

    /// Number of elements in a queue.
    pub fn queue_len(&self, key: &[u8]) -> usize {
        match self.queues.is_empty() {
            true => 0,
            false => self.queues.get(key).map_or(0, VecDeque::len),
        }
    }
}

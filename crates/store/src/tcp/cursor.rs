//! Reading fields from the start of bytes that may not all be there yet.

use super::wire::{MAX_KEY_LEN, MAX_VALUE_LEN, WireError};

/// Why a field could not be read.
pub(super) enum Stop {
    Short,
    Bad(WireError),
}

impl From<WireError> for Stop {
    fn from(err: WireError) -> Self {
        Self::Bad(err)
    }
}

pub(super) struct Cursor<'a> {
    pub(super) input: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Stop> {
        let bytes = self.input[self.at..].first_chunk().ok_or(Stop::Short)?;
        self.at += N;
        Ok(bytes)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Stop> {
        self.array().map(|&[byte]| byte)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Stop> {
        self.array().copied().map(u32::from_le_bytes)
    }

    pub(super) fn i64(&mut self) -> Result<i64, Stop> {
        self.array().copied().map(i64::from_le_bytes)
    }

    pub(super) fn length(&mut self, what: &'static str, limit: usize) -> Result<u64, Stop> {
        let got = self.array().copied().map(u64::from_le_bytes)?;
        match got <= limit as u64 {
            true => Ok(got),
            false => Err(WireError::TooLong { what, got, limit }.into()),
        }
    }

    pub(super) fn bytes(&mut self, what: &'static str, limit: usize) -> Result<&'a [u8], Stop> {
        let len = self.length(what, limit)? as usize;
        let bytes = self.input[self.at..].get(..len).ok_or(Stop::Short)?;
        self.at += len;
        Ok(bytes)
    }

    pub(super) fn key(&mut self) -> Result<&'a [u8], Stop> {
        self.bytes("key length", MAX_KEY_LEN)
    }

    pub(super) fn value(&mut self) -> Result<&'a [u8], Stop> {
        self.bytes("value length", MAX_VALUE_LEN)
    }
}

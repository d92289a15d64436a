//! The Mersenne Twister, because PyTorch shuffles with it.

const N: usize = 624;
const M: usize = 397;

/// MT19937 as Matsumoto and Nishimura define it.
pub(crate) struct Mt19937 {
    state: [u32; N],
    next: usize,
}

impl Mt19937 {
    pub(crate) fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let last = state[i - 1];
            state[i] = 1_812_433_253u32
                .wrapping_mul(last ^ (last >> 30))
                .wrapping_add(i as u32);
        }
        Self { state, next: N }
    }

    fn refill(&mut self) {
        for i in 0..N {
            let bits = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let odd = if bits & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (bits >> 1) ^ odd;
        }
        self.next = 0;
    }

    pub(crate) fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// The first word is the upper half.
    pub(crate) fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        high << 32 | u64::from(self.next_u32())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_thousandth_word_is_the_standards() {
        let mut twister = Mt19937::new(5489);
        let words = (0..10_000).map(|_| twister.next_u32());
        assert_eq!(words.last(), Some(4_123_659_995));
    }
}

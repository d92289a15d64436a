//! Which message answers which receive.
//!
//! No locks, no clock, no transport: messages and receives go in, pairs come out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// The bytes of a message, shared when the same ones go to several peers.
pub(crate) type Data = Arc<Vec<u8>>;

/// Most messages of one peer that are kept for receives to come.
pub(crate) const MAX_KEPT: usize = phalanx_pg::MAX_OUTSTANDING;

/// What a message is matched by, beside its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Label {
    /// A part (a batch has several) of the collective with this number.
    Collective { seq: u64, part: u32 },
    /// A point-to-point message with this tag.
    Tag(u32),
}

/// A message that has arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Letter {
    pub(crate) from: usize,
    pub(crate) data: Data,
}

/// What became of a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Delivery<R> {
    /// A posted receive takes it.
    Matched(R, Letter),
    /// It is kept for a receive to come.
    Kept,
    /// The sender has filled the mailbox; the message is lost.
    Full,
}

/// Messages nobody has asked for yet, and receives nothing has come for yet.
///
/// Among equal labels both are served in order: of the receives that accept a message the first
/// posted gets it, of the messages a receive accepts it gets the first that came.
#[derive(Debug)]
pub(crate) struct Mailbox<R> {
    /// Never holds a slot with nothing in it, nor a letter and a receive that fit each other.
    slots: HashMap<Label, Slot<R>>,
    /// Number of letters kept, by sender.
    kept: Vec<usize>,
    posted: usize,
}

#[derive(Debug)]
struct Slot<R> {
    letters: VecDeque<Letter>,
    /// From whom (`None`: anybody), and what it is.
    receives: VecDeque<(Option<usize>, R)>,
}

impl<R> Mailbox<R> {
    /// For letters from `size` ranks.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            slots: HashMap::new(),
            kept: vec![0; size],
            posted: 0,
        }
    }

    /// A message has come.
    pub(crate) fn deliver(&mut self, label: Label, letter: Letter) -> Delivery<R> {
        let slot = self.slots.entry(label).or_default();
        let accepts = |(from, _): &(Option<usize>, R)| from.is_none_or(|from| from == letter.from);
        if let Some(at) = slot.receives.iter().position(accepts) {
            let (_, receive) = slot.receives.remove(at).expect("just found");
            self.posted -= 1;
            self.tidy(label);
            return Delivery::Matched(receive, letter);
        }
        if self.kept[letter.from] >= MAX_KEPT {
            self.tidy(label);
            return Delivery::Full;
        }
        self.kept[letter.from] += 1;
        slot.letters.push_back(letter);
        Delivery::Kept
    }

    /// Takes the first message from `from`, or from anybody, if there is one.
    pub(crate) fn take(&mut self, from: Option<usize>, label: Label) -> Option<Letter> {
        let slot = self.slots.get_mut(&label)?;
        let fits = |letter: &Letter| from.is_none_or(|from| from == letter.from);
        let at = slot.letters.iter().position(fits)?;
        let letter = slot.letters.remove(at)?;
        self.kept[letter.from] -= 1;
        self.tidy(label);
        Some(letter)
    }

    /// Whether [`take`](Mailbox::take) would find a message from this rank.
    pub(crate) fn holds(&self, from: usize, label: Label) -> bool {
        let slot = self.slots.get(&label);
        slot.is_some_and(|slot| slot.letters.iter().any(|letter| letter.from == from))
    }

    /// Posts a receive; gives it back with its message if that is there already.
    pub(crate) fn post(
        &mut self,
        from: Option<usize>,
        label: Label,
        receive: R,
    ) -> Option<(R, Letter)> {
        if let Some(letter) = self.take(from, label) {
            return Some((receive, letter));
        }
        let slot = self.slots.entry(label).or_default();
        slot.receives.push_back((from, receive));
        self.posted += 1;
        None
    }

    /// Number of receives that wait.
    pub(crate) fn posted(&self) -> usize {
        self.posted
    }

    /// The receives that wait, in no particular order.
    pub(crate) fn receives(&self) -> impl Iterator<Item = &R> {
        let slots = self.slots.values();
        slots.flat_map(|slot| slot.receives.iter().map(|(_, receive)| receive))
    }

    /// Takes back a receive that waits.
    pub(crate) fn withdraw(&mut self, which: impl Fn(&R) -> bool) -> Option<R> {
        let found = self.slots.iter().find_map(|(&label, slot)| {
            let at = slot.receives.iter().position(|(_, r)| which(r))?;
            Some((label, at))
        });
        let (label, at) = found?;
        let (_, receive) = self.slots.get_mut(&label)?.receives.remove(at)?;
        self.posted -= 1;
        self.tidy(label);
        Some(receive)
    }

    /// Forgets every message and gives back every receive.
    pub(crate) fn empty(&mut self) -> Vec<R> {
        self.kept.fill(0);
        self.posted = 0;
        let slots = std::mem::take(&mut self.slots).into_values();
        slots
            .flat_map(|slot| slot.receives.into_iter().map(|(_, receive)| receive))
            .collect()
    }

    fn tidy(&mut self, label: Label) {
        let unused = |slot: &Slot<R>| slot.letters.is_empty() && slot.receives.is_empty();
        if self.slots.get(&label).is_some_and(unused) {
            self.slots.remove(&label);
        }
    }
}

impl<R> Default for Slot<R> {
    fn default() -> Self {
        Self {
            letters: VecDeque::new(),
            receives: VecDeque::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn letter(from: usize, byte: u8) -> Letter {
        Letter {
            from,
            data: Arc::new(vec![byte]),
        }
    }

    #[test]
    fn a_receive_from_anybody_takes_the_earliest_letter_of_its_tag() {
        let mut mailbox = Mailbox::new(3);
        mailbox.deliver(Label::Tag(1), letter(2, 20));
        mailbox.deliver(Label::Tag(1), letter(0, 10));
        mailbox.deliver(Label::Tag(2), letter(0, 30));
        assert_eq!(
            mailbox.post(None, Label::Tag(1), 'a'),
            Some(('a', letter(2, 20)))
        );
        assert_eq!(mailbox.post(Some(2), Label::Tag(1), 'b'), None);
        assert_eq!(
            mailbox.post(None, Label::Tag(1), 'c'),
            Some(('c', letter(0, 10)))
        );
        assert_eq!(
            mailbox.deliver(Label::Tag(1), letter(2, 40)),
            Delivery::Matched('b', letter(2, 40))
        );
    }

    #[test]
    fn a_collective_s_letters_and_tags_do_not_meet() {
        let mut mailbox = Mailbox::new(2);
        let label = Label::Collective { seq: 7, part: 0 };
        mailbox.deliver(label, letter(1, 1));
        assert_eq!(mailbox.post(Some(1), Label::Tag(7), ()), None);
        assert_eq!(
            mailbox.take(Some(1), Label::Collective { seq: 7, part: 1 }),
            None
        );
        assert_eq!(mailbox.take(Some(1), label), Some(letter(1, 1)));
    }

    #[test]
    fn a_peer_that_floods_is_told_apart_from_one_that_does_not() {
        let mut mailbox = Mailbox::<()>::new(2);
        for _ in 0..MAX_KEPT {
            assert_eq!(mailbox.deliver(Label::Tag(0), letter(1, 0)), Delivery::Kept);
        }
        assert_eq!(mailbox.deliver(Label::Tag(0), letter(1, 0)), Delivery::Full);
        assert_eq!(mailbox.deliver(Label::Tag(0), letter(0, 0)), Delivery::Kept);
    }

    #[derive(Debug, Clone)]
    enum Event {
        Deliver { from: usize, tag: u32 },
        Post { from: Option<usize>, tag: u32 },
    }

    fn event() -> impl Strategy<Value = Event> {
        let deliver = (0..3usize, 0..2u32).prop_map(|(from, tag)| Event::Deliver { from, tag });
        let post = (prop::option::of(0..3usize), 0..2u32)
            .prop_map(|(from, tag)| Event::Post { from, tag });
        prop_oneof![deliver, post]
    }

    /// The rule in its plainest form: two lists, searched from the front.
    #[derive(Default)]
    struct Lists {
        letters: Vec<(usize, usize, u32)>,
        receives: Vec<(usize, Option<usize>, u32)>,
    }

    impl Lists {
        /// The pair (receive, letter) that event number `n` makes.
        fn step(&mut self, n: usize, event: &Event) -> Option<(usize, usize)> {
            let fits = |from: Option<usize>, sender| from.is_none_or(|from| from == sender);
            match *event {
                Event::Deliver { from, tag } => {
                    let wants = |r: &(usize, Option<usize>, u32)| fits(r.1, from) && r.2 == tag;
                    match self.receives.iter().position(wants) {
                        Some(at) => return Some((self.receives.remove(at).0, n)),
                        None => self.letters.push((n, from, tag)),
                    }
                }
                Event::Post { from, tag } => {
                    let wanted = |l: &(usize, usize, u32)| fits(from, l.1) && l.2 == tag;
                    match self.letters.iter().position(wanted) {
                        Some(at) => return Some((n, self.letters.remove(at).0)),
                        None => self.receives.push((n, from, tag)),
                    }
                }
            }
            None
        }
    }

    proptest! {
        #[test]
        fn matches_as_two_lists_would(events in prop::collection::vec(event(), 0..60)) {
            let (mut mailbox, mut lists) = (Mailbox::new(3), Lists::default());
            for (n, event) in events.iter().enumerate() {
                let paired = match *event {
                    Event::Deliver { from, tag } => {
                        match mailbox.deliver(Label::Tag(tag), letter(from, n as u8)) {
                            Delivery::Matched(receive, letter) => Some((receive, letter)),
                            _ => None,
                        }
                    }
                    Event::Post { from, tag } => mailbox.post(from, Label::Tag(tag), n),
                };
                let paired = paired.map(|(receive, letter)| (receive, letter.data[0] as usize));
                prop_assert_eq!(paired, lists.step(n, event));
                prop_assert_eq!(mailbox.posted(), lists.receives.len());
                prop_assert_eq!(mailbox.kept.iter().sum::<usize>(), lists.letters.len());
            }
            let mut left = mailbox.empty();
            left.sort_unstable();
            prop_assert_eq!(left, lists.receives.iter().map(|r| r.0).collect::<Vec<_>>());
            prop_assert!(mailbox.slots.is_empty());
        }
    }
}

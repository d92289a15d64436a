//! Buffers never alias: random sequences of splits, joins, freezes and thaws against a model.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_pg::{Buffer, DType, Device, Frozen, State, completion};
use proptest::prelude::*;

/// Memory of a test's own that counts how often it is given back.
struct Owner {
    memory: *mut [u32],
    dropped: Arc<AtomicUsize>,
}

// SAFETY: the pointer is used by `drop` only, once.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        // SAFETY: it came from `Box::into_raw`, and this is the one place that frees it.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}

/// A buffer on foreign memory holding 0, 1, 2, ... and the count of its owner's drops.
fn foreign(len: usize) -> (Buffer, Arc<AtomicUsize>) {
    let memory: *mut [u32] = Box::into_raw((0..len as u32).collect::<Box<[u32]>>());
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner = Owner {
        memory,
        dropped: Arc::clone(&dropped),
    };
    let ptr = NonNull::new(memory.cast::<u8>()).unwrap();
    let keep: Box<dyn Any + Send + Sync> = Box::new(owner);
    // SAFETY: a live allocation of `len` elements of four bytes, reached through the buffer only
    // until the owner is dropped.
    let buffer = unsafe { Buffer::from_raw(ptr, DType::I32, len, Device::Cpu, 0, keep) };
    (buffer, dropped)
}

/// One handle with what the model expects behind it.
enum Held {
    Owned(Buffer, Vec<i32>),
    Shared(Vec<Frozen>, Vec<i32>),
}

#[derive(Debug, Clone)]
enum Step {
    Split { at: usize, cut: usize },
    SplitEven { at: usize, parts: usize },
    Unsplit { left: usize, right: usize },
    Freeze { at: usize },
    CloneFrozen { at: usize },
    DropClone { at: usize },
    Thaw { at: usize },
    Write { at: usize, value: i32 },
    Drop { at: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let at = 0usize..64;
    prop_oneof![
        4 => (at.clone(), 0usize..64).prop_map(|(at, cut)| Step::Split { at, cut }),
        1 => (at.clone(), 1usize..5).prop_map(|(at, parts)| Step::SplitEven { at, parts }),
        4 => (at.clone(), at.clone()).prop_map(|(left, right)| Step::Unsplit { left, right }),
        2 => at.clone().prop_map(|at| Step::Freeze { at }),
        2 => at.clone().prop_map(|at| Step::CloneFrozen { at }),
        1 => at.clone().prop_map(|at| Step::DropClone { at }),
        2 => at.clone().prop_map(|at| Step::Thaw { at }),
        4 => (at.clone(), any::<i32>()).prop_map(|(at, value)| Step::Write { at, value }),
        1 => at.prop_map(|at| Step::Drop { at }),
    ]
}

fn take(held: &mut Vec<Held>, at: usize) -> Option<Held> {
    (!held.is_empty()).then(|| held.swap_remove(at % held.len()))
}

fn apply(held: &mut Vec<Held>, step: Step) {
    match step {
        Step::Split { at, cut } => match take(held, at) {
            Some(Held::Owned(buffer, mut model)) => {
                let cut = cut % (model.len() + 1);
                let (left, right) = buffer.split_at(cut);
                let tail = model.split_off(cut);
                held.push(Held::Owned(left, model));
                held.push(Held::Owned(right, tail));
            }
            other => held.extend(other),
        },
        Step::SplitEven { at, parts } => match take(held, at) {
            Some(Held::Owned(buffer, model)) if model.len() % parts == 0 => {
                let each = model.len() / parts;
                for (i, piece) in buffer.split_even(parts).into_iter().enumerate() {
                    held.push(Held::Owned(piece, model[i * each..][..each].to_vec()));
                }
            }
            other => held.extend(other),
        },
        Step::Unsplit { left, right } => unsplit(held, left, right),
        Step::Freeze { at } => match take(held, at) {
            Some(Held::Owned(buffer, model)) => {
                held.push(Held::Shared(vec![buffer.freeze()], model));
            }
            other => held.extend(other),
        },
        Step::CloneFrozen { at } => {
            let len = held.len().max(1);
            if let Some(Held::Shared(handles, _)) = held.get_mut(at % len) {
                handles.push(handles[0].clone());
            }
        }
        Step::DropClone { at } => {
            let len = held.len().max(1);
            if let Some(Held::Shared(handles, _)) = held.get_mut(at % len)
                && handles.len() > 1
            {
                handles.pop();
            }
        }
        Step::Thaw { at } => match take(held, at) {
            Some(Held::Shared(mut handles, model)) => {
                let others = handles.len() - 1;
                match handles.pop().expect("never empty").try_thaw() {
                    Ok(buffer) => {
                        assert_eq!(others, 0, "thawed under a reader");
                        held.push(Held::Owned(buffer, model));
                    }
                    Err(frozen) => {
                        assert_ne!(others, 0, "the last handle thaws");
                        handles.push(frozen);
                        held.push(Held::Shared(handles, model));
                    }
                }
            }
            other => held.extend(other),
        },
        Step::Write { at, value } => {
            let len = held.len().max(1);
            if let Some(Held::Owned(buffer, model)) = held.get_mut(at % len) {
                let slice = buffer.as_mut_slice::<i32>().unwrap();
                for (i, (slot, expected)) in slice.iter_mut().zip(model).enumerate() {
                    *expected = value.wrapping_add(i as i32);
                    *slot = *expected;
                }
            }
        }
        Step::Drop { at } => drop(take(held, at)),
    }
}

fn unsplit(held: &mut Vec<Held>, left: usize, right: usize) {
    let (Some(left), Some(right)) = (take(held, left), take(held, right)) else {
        return;
    };
    match (left, right) {
        (Held::Owned(left, mut front), Held::Owned(right, back)) => {
            let neighbours = left.offset() + left.byte_len() == right.offset();
            match left.unsplit(right) {
                Ok(joined) => {
                    assert!(neighbours, "joined strangers");
                    front.extend(back);
                    held.push(Held::Owned(joined, front));
                }
                Err((left, right)) => {
                    assert!(!neighbours, "refused neighbours");
                    held.push(Held::Owned(left, front));
                    held.push(Held::Owned(right, back));
                }
            }
        }
        (left, right) => held.extend([left, right]),
    }
}

/// Every handle shows what the model says, and no byte belongs to two of them.
fn check(held: &[Held], len: usize) {
    let mut claimed = vec![false; len * 4];
    for one in held {
        let (buffer, model): (&Buffer, _) = match one {
            Held::Owned(buffer, model) => (buffer, model),
            Held::Shared(handles, model) => (&handles[0], model),
        };
        assert_eq!(buffer.as_slice::<i32>().unwrap(), &model[..]);
        assert_eq!(buffer.len(), model.len());
        for byte in &mut claimed[buffer.offset()..][..buffer.byte_len()] {
            assert!(!std::mem::replace(byte, true), "a byte has two owners");
        }
    }
}

proptest! {
    #[test]
    fn ranges_never_alias_and_the_owner_is_dropped_once(
        len in 0usize..40,
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let (buffer, dropped) = foreign(len);
        let mut held = vec![Held::Owned(buffer, (0..len as i32).collect())];
        for step in steps {
            apply(&mut held, step);
            check(&held, len);
            let expected = usize::from(held.is_empty());
            prop_assert_eq!(dropped.load(Ordering::SeqCst), expected);
        }
        drop(held);
        prop_assert_eq!(dropped.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn pieces_join_to_the_whole_in_any_order(
        cuts in prop::collection::vec(0usize..50, 0..8),
        order in prop::collection::vec(any::<prop::sample::Index>(), 8),
    ) {
        let whole: Vec<i32> = (0..50).collect();
        let mut pieces = Vec::new();
        let mut rest = Buffer::from_vec(whole.clone());
        let mut cuts = cuts;
        cuts.sort_unstable();
        let mut start = 0;
        for cut in cuts {
            let (piece, tail) = rest.split_at(cut - start);
            pieces.push(piece);
            rest = tail;
            start = cut;
        }
        pieces.push(rest);
        for index in order {
            if pieces.len() < 2 {
                break;
            }
            let at = index.index(pieces.len() - 1);
            let right = pieces.remove(at + 1);
            let left = pieces.remove(at);
            pieces.insert(at, left.unsplit(right).unwrap());
        }
        prop_assert_eq!(pieces.len(), 1);
        prop_assert_eq!(pieces[0].as_slice::<i32>().unwrap(), &whole[..]);
    }
}

#[test]
fn buffers_of_different_blocks_do_not_join() {
    let (left, _) = Buffer::from_vec(vec![1i32, 2]).split_at(2);
    let (_, right) = Buffer::from_vec(vec![1i32, 2]).split_at(2);
    assert!(left.unsplit(right).is_err());
}

#[test]
fn a_vectors_memory_cannot_be_reached_beside_the_buffer() {
    let buffer = Buffer::from_vec(vec![1.0f32]);
    assert!(buffer.owner::<Vec<f32>>().is_none());
}

#[test]
fn a_backend_recognises_its_own_memory() {
    let (buffer, _) = foreign(4);
    let (_, right) = buffer.split_at(3);
    assert!(right.owner::<Owner>().is_some());
    assert!(right.owner::<String>().is_none());
    assert_eq!(right.offset(), 12);
}

#[test]
fn a_watcher_keeps_no_memory_of_a_detached_operation() {
    for detach_first in [true, false] {
        let (buffer, dropped) = foreign(4);
        let (completer, work) = completion();
        let status = work.status();
        match detach_first {
            true => {
                drop(work);
                completer.complete(Ok(buffer.into()));
            }
            false => {
                completer.complete(Ok(buffer.into()));
                drop(work);
            }
        }
        assert!(matches!(status.state(), State::Succeeded));
        let count = dropped.load(Ordering::SeqCst);
        assert_eq!(count, 1, "detached first: {detach_first}");
    }
}

#[test]
fn a_wrong_element_type_is_refused() {
    let mut buffer = Buffer::from_vec(vec![1i32]);
    assert!(buffer.as_slice::<f32>().is_err());
    assert!(buffer.as_mut_slice::<i64>().is_err());
    let bools = Buffer::from_bools(&[true, false]);
    assert_eq!(bools.as_slice::<u8>().unwrap(), [1, 0]);
    assert!(bools.as_slice::<i8>().is_err());
}

#[test]
fn every_type_is_aligned_also_when_empty_or_cut() {
    for dtype in DType::ALL {
        for len in [0, 1, 7] {
            let (left, right) = Buffer::zeroed(dtype, len).split_at(len / 2);
            for piece in [left, right] {
                let address = piece.as_ptr().as_ptr() as usize;
                assert!(address.is_multiple_of(dtype.size().min(8)), "{dtype}");
                assert!(piece.as_bytes().unwrap().iter().all(|&byte| byte == 0));
            }
        }
    }
}

#[test]
#[should_panic(expected = "split at 3 of 2")]
fn a_cut_beyond_the_end_panics() {
    let _ = Buffer::from_vec(vec![1i32, 2]).split_at(3);
}

#[test]
#[should_panic(expected = "overflows")]
fn an_absurd_length_panics_instead_of_wrapping() {
    let _ = Buffer::zeroed(DType::F64, usize::MAX / 4);
}

/// Bytes from some place in a vector of words on, and a note when they are dropped.
struct Words(
    Vec<u64>,
    usize,
    #[expect(dead_code, reason = "counted")] Arc<()>,
);

impl AsMut<[u8]> for Words {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[self.1..]
    }
}

#[test]
fn a_values_own_memory_is_used_until_the_last_part_of_it_is_gone() {
    let alive = Arc::new(());
    let mut words = Words(vec![u64::MAX; 4], 8, Arc::clone(&alive));
    let place = words.as_mut().as_ptr();
    let buffer = Buffer::from_owner(DType::F32, words).ok().unwrap();
    assert_eq!(
        (buffer.as_ptr().as_ptr().cast_const(), buffer.len()),
        (place, 6)
    );
    let (mut left, right) = buffer.split_at(2);
    left.as_mut_slice::<f32>().unwrap().fill(1.5);
    assert_eq!(left.as_slice::<f32>().unwrap(), [1.5, 1.5]);
    drop(left);
    let right = std::thread::spawn(move || right).join().unwrap();
    assert!(
        right
            .as_bytes()
            .unwrap()
            .iter()
            .all(|&byte| byte == u8::MAX)
    );
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(right);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn memory_that_does_not_fit_the_type_is_given_back() {
    let alive = Arc::new(());
    let words = |skip| Words(vec![1; 4], skip, Arc::clone(&alive));
    for (dtype, skip) in [
        (DType::F32, 2),
        (DType::F64, 4),
        (DType::F32, 1),
        (DType::Bool, 0),
    ] {
        let back = Buffer::from_owner(dtype, words(skip)).err();
        assert_eq!(back.unwrap().1, skip, "{dtype} from byte {skip}");
        assert_eq!(Arc::strong_count(&alive), 1);
    }
    assert!(Buffer::from_owner(DType::U8, words(3)).is_ok());
    for nothing in [words(32), Words(Vec::new(), 0, Arc::clone(&alive))] {
        let empty = Buffer::from_owner(DType::F64, nothing);
        assert!(empty.is_ok_and(|empty| empty.is_empty()));
    }
    assert_eq!(Arc::strong_count(&alive), 1);
}

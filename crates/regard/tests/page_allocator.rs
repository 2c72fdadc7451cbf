//! The page allocator against a naive model: every sequence is a plain list of token values, and a
//! pool in memory is written and copied exactly as the allocator returned. After every operation
//! each token must still be in the slot that the table gives, even if its block is shared.

use proptest::prelude::*;
use proptest::sample::Index;
use regard::Error;
use regard::paged::{PageAllocator, SequenceId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone)]
enum Operation {
    Create,
    Fork(Index),
    /// Keeps the share of the length that the second index picks.
    ForkAt(Index, Index),
    Append(Index, usize),
    Truncate(Index, Index),
    ReleaseBefore(Index, Index),
    Free(Index),
}

fn operation(block_size: usize) -> impl Strategy<Value = Operation> {
    let any = || any::<Index>();
    prop_oneof![
        2 => Just(Operation::Create),
        2 => any().prop_map(Operation::Fork),
        2 => (any(), any()).prop_map(|(sequence, len)| Operation::ForkAt(sequence, len)),
        8 => (any(), 0..3 * block_size + 2)
            .prop_map(|(sequence, tokens)| Operation::Append(sequence, tokens)),
        3 => (any(), any()).prop_map(|(sequence, len)| Operation::Truncate(sequence, len)),
        1 => (any(), any())
            .prop_map(|(sequence, position)| Operation::ReleaseBefore(sequence, position)),
        2 => any().prop_map(Operation::Free),
    ]
}

/// A simple, slow model of the allocator.
struct Model {
    pages: PageAllocator,
    /// The tokens of each sequence, and the number of leading tokens that were released.
    sequences: BTreeMap<SequenceId, (Vec<u64>, usize)>,
    /// One token value per slot; 0 if it was never written, or holds garbage.
    pool: Vec<u64>,
    next_token: u64,
}

impl Model {
    fn new(blocks: usize, block_size: usize) -> Model {
        Model {
            pages: PageAllocator::new(blocks, block_size).expect("sound sizes"),
            sequences: BTreeMap::new(),
            pool: vec![0; blocks * block_size],
            next_token: 1,
        }
    }

    fn pick(&self, index: &Index) -> Option<SequenceId> {
        let ids: Vec<_> = self.sequences.keys().copied().collect();
        (!ids.is_empty()).then(|| *index.get(&ids))
    }

    /// A length at which a sequence may end.
    fn pick_len(&self, id: SequenceId, index: &Index) -> usize {
        let (tokens, released) = &self.sequences[&id];
        released + index.index(tokens.len() - released + 1)
    }

    fn apply(&mut self, operation: &Operation) {
        let block_size = self.pages.block_size();
        match operation {
            Operation::Create => {
                let id = self.pages.create();
                assert!(
                    self.sequences.insert(id, (Vec::new(), 0)).is_none(),
                    "an id is used twice"
                );
            }
            Operation::Fork(index) => {
                let Some(id) = self.pick(index) else { return };
                let child = self.pages.fork(id).expect("alive");
                let copy = self.sequences[&id].clone();
                assert!(self.sequences.insert(child, copy).is_none());
            }
            Operation::ForkAt(index, len) => {
                let Some(id) = self.pick(index) else { return };
                let len = self.pick_len(id, len);
                let child = self.pages.fork_at(id, len).expect("alive and long enough");
                let (tokens, released) = &self.sequences[&id];
                let copy = (tokens[..len].to_vec(), *released);
                assert!(self.sequences.insert(child, copy).is_none());
            }
            Operation::Append(index, tokens) => {
                let Some(id) = self.pick(index) else { return };
                self.append(id, *tokens);
            }
            Operation::Truncate(index, len) => {
                let Some(id) = self.pick(index) else { return };
                let len = self.pick_len(id, len);
                self.pages.truncate(id, len).expect("alive and long enough");
                self.sequences.get_mut(&id).expect("alive").0.truncate(len);
            }
            Operation::ReleaseBefore(index, position) => {
                let Some(id) = self.pick(index) else { return };
                // Past the end too.
                let position = position.index(self.sequences[&id].0.len() + block_size + 1);
                let before = self.pages.free_blocks();
                let freed = self.pages.release_before(id, position).expect("alive");
                assert_eq!(self.pages.free_blocks(), before + freed);
                let (tokens, released) = self.sequences.get_mut(&id).expect("alive");
                *released = (*released).max(position.min(tokens.len()) / block_size * block_size);
            }
            Operation::Free(index) => {
                let Some(id) = self.pick(index) else { return };
                self.pages.free(id).expect("alive");
                self.sequences.remove(&id);
                assert!(self.pages.free(id).is_err(), "freed twice");
            }
        }
    }

    fn append(&mut self, id: SequenceId, tokens: usize) {
        let block_size = self.pages.block_size();
        let len = self.sequences[&id].0.len();
        let table = self.pages.blocks(id).expect("alive").to_vec();
        let tail_is_shared = tokens > 0
            && !len.is_multiple_of(block_size)
            && self.sequences.keys().any(|&other| {
                other != id
                    && self
                        .pages
                        .blocks(other)
                        .expect("alive")
                        .contains(table.last().expect("a tail"))
            });
        let needed = (len + tokens).div_ceil(block_size) - len.div_ceil(block_size);
        let needed = needed + usize::from(tail_is_shared);
        let (free, total) = (self.pages.free_blocks(), self.pages.total_blocks());
        let append = match self.pages.append(id, tokens) {
            Err(error) => {
                assert!(needed > free, "refused {needed} blocks with {free} free");
                assert_eq!(error, Error::OutOfPages { needed, free, total });
                assert_eq!(self.pages.blocks(id).expect("alive"), table);
                assert_eq!(
                    (self.pages.len(id).expect("alive"), self.pages.free_blocks()),
                    (len, free)
                );
                return;
            }
            Ok(append) => append,
        };
        assert_eq!(append.positions(), len..len + tokens);
        assert_eq!(append.copy.is_some(), tail_is_shared);
        if let Some(copy) = append.copy {
            assert_eq!(copy.slots, len % block_size);
            let from = copy.from * block_size;
            self.pool.copy_within(from..from + copy.slots, copy.to * block_size);
        }
        let mut next = 0;
        for range in append.ranges() {
            assert_eq!((range.tokens.start, range.tokens.len()), (next, range.slots.len()));
            assert!(!range.slots.is_empty() && range.slots.end <= block_size);
            next = range.tokens.end;
            for (slot, token) in range.slots.zip(range.tokens) {
                self.pool[range.block * block_size + slot] = self.next_token + token as u64;
            }
        }
        assert_eq!(next, tokens, "every token has a slot");
        assert_eq!(self.pages.free_blocks(), free - needed);
        let new = self.next_token..self.next_token + tokens as u64;
        self.next_token = new.end;
        self.sequences.get_mut(&id).expect("alive").0.extend(new);
    }

    /// Everything that must hold after every operation.
    fn check(&mut self) {
        let block_size = self.pages.block_size();
        let mut holders = vec![0usize; self.pages.total_blocks()];
        for (&id, (tokens, released)) in &self.sequences {
            let table = self.pages.blocks(id).expect("alive");
            assert_eq!(
                (self.pages.len(id).expect("alive"), table.len()),
                (tokens.len(), tokens.len().div_ceil(block_size))
            );
            let gone = released / block_size;
            assert!(table[..gone].iter().all(|&block| block == -1));
            let distinct: BTreeSet<_> = table[gone..].iter().collect();
            assert_eq!(distinct.len(), table.len() - gone, "a block twice in one table");
            for &block in &table[gone..] {
                holders[usize::try_from(block).expect("not released")] += 1;
            }
            for (position, &token) in tokens.iter().enumerate().skip(*released) {
                let slot =
                    table[position / block_size] as usize * block_size + position % block_size;
                assert_eq!(self.pool[slot], token, "position {position} of {id:?}");
            }
        }
        for (block, &expected) in holders.iter().enumerate() {
            assert_eq!(
                self.pages.holders(block).expect("in the pool"),
                expected,
                "holders of block {block}"
            );
            if expected == 0 {
                // A sequence that still uses a block without a holder is found out.
                self.pool[block * block_size..][..block_size].fill(0);
            }
        }
        let used = holders.iter().filter(|&&count| count > 0).count();
        assert_eq!(
            (self.pages.used_blocks(), self.pages.free_blocks()),
            (used, holders.len() - used)
        );
        assert_eq!(self.pages.sequences(), self.sequences.len());
        self.check_export();
    }

    fn check_export(&self) {
        let ids: Vec<_> = self.sequences.keys().rev().copied().collect();
        let width = self.pages.longest_table(&ids).expect("alive") + 1;
        let (mut table, mut kv_lens) = (vec![7; ids.len() * width], vec![7; ids.len()]);
        self.pages.block_table(&ids, &mut table).expect("wide enough");
        self.pages.kv_lens(&ids, &mut kv_lens).expect("one per sequence");
        for (i, id) in ids.iter().enumerate() {
            let row = &table[i * width..(i + 1) * width];
            let blocks = self.pages.blocks(*id).expect("alive");
            assert_eq!(&row[..blocks.len()], blocks);
            assert!(row[blocks.len()..].iter().all(|&entry| entry == -1));
            assert_eq!(kv_lens[i] as usize, self.sequences[id].0.len());
        }
    }
}

fn scenario() -> impl Strategy<Value = (usize, usize, Vec<Operation>)> {
    (0usize..24, 1usize..6).prop_flat_map(|(blocks, block_size)| {
        (Just(blocks), Just(block_size), proptest::collection::vec(operation(block_size), 0..80))
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_token_survives_and_every_page_comes_back(
        (blocks, block_size, operations) in scenario(),
    ) {
        let mut model = Model::new(blocks, block_size);
        for operation in &operations {
            model.apply(operation);
            model.check();
        }
        let ids: Vec<_> = model.sequences.keys().copied().collect();
        for id in ids {
            model.pages.free(id).expect("alive");
        }
        prop_assert_eq!((model.pages.free_blocks(), model.pages.sequences()), (blocks, 0));
    }
}

/// An engine answers several appends before it touches the pool: all copies, in order, then all
/// writes.
#[test]
fn copies_of_several_appends_can_be_done_together() {
    let (blocks, block_size) = (6, 4);
    let mut pages = PageAllocator::new(blocks, block_size).expect("sound sizes");
    let mut pool = vec![0u64; blocks * block_size];
    let parent = pages.create();
    for range in pages.append(parent, 3).expect("room").ranges() {
        for (slot, token) in range.slots.zip(range.tokens) {
            pool[range.block * block_size + slot] = 100 + token as u64;
        }
    }
    // One fork shares two tokens of the block, the other all three; the last holder writes in
    // place.
    let children =
        [pages.fork_at(parent, 2).expect("alive"), pages.fork(parent).expect("alive"), parent];
    let (mut copies, mut writes) = (Vec::new(), Vec::new());
    for (child, &id) in children.iter().enumerate() {
        let append = pages.append(id, 1).expect("room");
        copies.extend(append.copy);
        writes.extend(
            append
                .ranges()
                .map(|range| (range.block * block_size + range.slots.start, child as u64)),
        );
    }
    assert_eq!(copies.len(), 2);
    for copy in copies {
        let from = copy.from * block_size;
        pool.copy_within(from..from + copy.slots, copy.to * block_size);
    }
    for (slot, value) in writes {
        pool[slot] = value;
    }
    let tokens = |id| {
        let table = pages.blocks(id).expect("alive");
        let len = pages.len(id).expect("alive");
        (0..len)
            .map(|i| pool[table[i / block_size] as usize * block_size + i % block_size])
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(children[0]), [100, 101, 0]);
    assert_eq!(tokens(children[1]), [100, 101, 102, 1]);
    assert_eq!(tokens(parent), [100, 101, 102, 2]);
}

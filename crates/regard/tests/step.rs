//! One step of continuous batching: ragged queries of several sequences over one pool, against each
//! sequence alone.

use regard::paged::{PageAllocator, Step, TableLayout};
use regard::{Attention, Error, Tensor, attention};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const BLOCK: usize = 4;

/// Something different for every element, token, head and purpose.
fn value(purpose: usize, token: usize, i: usize) -> f32 {
    ((purpose * 7919 + token * 131 + i * 17) % 97) as f32 / 48.0 - 1.0
}

fn rows(purpose: usize, tokens: impl IntoIterator<Item = usize>, width: usize) -> Vec<f32> {
    tokens.into_iter().flat_map(|token| (0..width).map(move |i| value(purpose, token, i))).collect()
}

/// Keys and values of a step: copies first, then the new tokens.
struct Pool {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Pool {
    fn write(&mut self, step: &Step, tokens: &[usize]) {
        const ROW: usize = KV_HEADS * DIM;
        for copy in step.copies() {
            for pool in [&mut self.keys, &mut self.values] {
                let from = copy.from * BLOCK * ROW;
                pool.copy_within(from..from + copy.slots * ROW, copy.to * BLOCK * ROW);
            }
        }
        for (&slot, &token) in step.slots().iter().zip(tokens) {
            let at = slot as usize * ROW;
            self.keys[at..at + ROW].copy_from_slice(&rows(1, [token], ROW));
            self.values[at..at + ROW].copy_from_slice(&rows(2, [token], ROW));
        }
    }
}

/// The rows of tokens `new` with all of `tokens` before them, alone and dense.
fn alone(tokens: &[usize], new: usize) -> Vec<f32> {
    let queries = rows(0, tokens[tokens.len() - new..].iter().copied(), HEADS * DIM);
    let keys = rows(1, tokens.iter().copied(), KV_HEADS * DIM);
    let values = rows(2, tokens.iter().copied(), KV_HEADS * DIM);
    attention(
        Tensor::new(&queries, [1, new, HEADS, DIM]).expect("queries"),
        Tensor::new(&keys, [1, tokens.len(), KV_HEADS, DIM]).expect("keys"),
        Tensor::new(&values, [1, tokens.len(), KV_HEADS, DIM]).expect("values"),
        &Attention { batch_invariant: true, ..Attention::causal() },
    )
    .expect("sound operands")
}

#[test]
fn chunks_and_decodes_of_forked_sequences_in_one_step_equal_each_alone() {
    let blocks = 32;
    let mut pages = PageAllocator::new(blocks, BLOCK).expect("sound sizes");
    let mut pool = Pool {
        keys: vec![f32::NAN; blocks * BLOCK * KV_HEADS * DIM],
        values: vec![f32::NAN; blocks * BLOCK * KV_HEADS * DIM],
    };
    let mut step = Step::new();
    let system: Vec<usize> = (0..7).collect();
    let first = pages.create();
    step.append(&mut pages, first, system.len()).expect("room");
    step.finish(&pages).expect("alive");
    pool.write(&step, &system);

    // Two more share the system prompt, the last of its blocks partly filled; one starts from
    // nothing.
    let second = pages.fork(first).expect("alive");
    let third = pages.fork_at(first, 5).expect("alive");
    let fourth = pages.create();
    let mut texts = vec![
        (first, system.clone()),
        (second, system.clone()),
        (third, system[..5].to_vec()),
        (fourth, vec![]),
    ];
    for round in 0..4 {
        step.clear();
        let mut new_tokens = Vec::new();
        for (i, (sequence, text)) in texts.iter_mut().enumerate() {
            let new: Vec<usize> = match (i, round) {
                (3, 0) => (100..109).collect(),
                (2, 1) => (200..203).collect(),
                _ => vec![1000 + i * 10 + round],
            };
            step.append(&mut pages, *sequence, new.len()).expect("room");
            text.extend(&new);
            new_tokens.push(new);
        }
        step.finish(&pages).expect("alive");
        let flat = new_tokens.concat();
        assert_eq!(step.tokens(), flat.len());
        pool.write(&step, &flat);

        let queries = rows(0, flat.iter().copied(), HEADS * DIM);
        let shape = [blocks, BLOCK, KV_HEADS, DIM];
        let found: Vec<f32> = attention(
            Tensor::new(&queries, [flat.len(), HEADS, DIM]).expect("queries"),
            Tensor::new(&pool.keys, shape).expect("keys"),
            Tensor::new(&pool.values, shape).expect("values"),
            &Attention { batch_invariant: true, ..step.attention() },
        )
        .expect("sound operands");
        let expected: Vec<f32> = texts
            .iter()
            .zip(&new_tokens)
            .flat_map(|((_, text), new)| alone(text, new.len()))
            .collect();
        assert_eq!(found, expected, "round {round}");
    }
    for (sequence, _) in texts {
        pages.free(sequence).expect("alive");
    }
    assert_eq!(pages.free_blocks(), blocks);
}

#[test]
fn a_full_pool_changes_nothing_and_misuse_is_named() {
    let mut pages = PageAllocator::new(2, BLOCK).expect("sound sizes");
    let (a, b) = (pages.create(), pages.create());
    let mut step = Step::new();
    step.append(&mut pages, a, 5).expect("room");
    assert!(matches!(
        step.append(&mut pages, b, 1),
        Err(Error::OutOfPages { needed: 1, free: 0, total: 2 })
    ));
    assert_eq!((step.tokens(), step.sequences().len()), (5, 1));
    let twice = step.append(&mut pages, a, 1).expect_err("given twice").to_string();
    assert!(twice.contains("given twice"), "{twice}");
    pages.truncate(a, 3).expect("alive");
    let changed = step.finish(&pages).expect_err("shorter now").to_string();
    assert!(changed.contains("3 tokens") && changed.contains("5 tokens"), "{changed}");
    step.clear();
    step.append(&mut pages, a, 1).expect("room");
    step.finish(&pages).expect("as added");
    let late = step.append(&mut pages, b, 1).expect_err("finished").to_string();
    assert!(late.contains("finished"), "{late}");
    step.clear();
    assert!(step.is_empty());
    step.finish(&pages).expect("nothing to do");
    assert_eq!(step.block_table(), [0; 0]);
}

#[test]
fn a_default_step_is_a_new_one() {
    let mut pages = PageAllocator::new(2, BLOCK).expect("sound sizes");
    let mut step = Step::default();
    assert_eq!(step.cu_seqlens_q(), Step::new().cu_seqlens_q());
    let sequence = pages.create();
    step.append(&mut pages, sequence, 3).expect("room");
    step.finish(&pages).expect("as added");
    assert_eq!(step.cu_seqlens_q(), [0, 3]);
    let q = rows(0, 0..3, HEADS * DIM);
    let pool = vec![0.5; 2 * BLOCK * KV_HEADS * DIM];
    let pool = Tensor::new(&pool, [2, BLOCK, KV_HEADS, DIM]).expect("whole");
    let q = Tensor::new(&q, [3, HEADS, DIM]).expect("whole");
    let out: Vec<f32> = attention(q, pool, pool, &step.attention()).expect("sound operands");
    assert_eq!(out.len(), 3 * HEADS * DIM);
}

#[test]
fn a_sequence_of_another_allocator_is_an_error() {
    let mut pages = PageAllocator::new(4, BLOCK).expect("sound sizes");
    let mut others = PageAllocator::new(4, BLOCK).expect("sound sizes");
    let (own, foreign) = (pages.create(), others.create());
    assert_ne!(own, foreign);
    let mut step = Step::new();
    let refused = |result: Result<(), Error>| {
        let message = result.expect_err("not its own").to_string();
        assert!(message.contains("a sequence of this allocator"), "{message}");
    };
    refused(step.append(&mut pages, foreign, 1));
    refused(pages.append(foreign, 1).map(|_| ()));
    refused(pages.free(foreign));
    refused(pages.fork(foreign).map(|_| ()));
    refused(pages.truncate(foreign, 0));
    refused(pages.release_before(foreign, 0).map(|_| ()));
    assert_eq!((step.tokens(), pages.used_blocks()), (0, 0));
    step.append(&mut pages, own, 1).expect("room");
    refused(step.finish(&others));
    // A clone knows the sequences that existed before it. Neither knows the other's later
    // sequences.
    let mut clone = pages.clone();
    assert_eq!(clone.len(own).expect("known to both"), 1);
    let (here, there) = (pages.create(), clone.create());
    refused(pages.len(there).map(|_| ()));
    refused(clone.len(here).map(|_| ()));
}

#[test]
fn tables_are_packed_into_one_buffer() {
    let mut pages = PageAllocator::new(16, BLOCK).expect("sound sizes");
    let (a, b) = (pages.create(), pages.create());
    let mut step = Step::new();
    step.append(&mut pages, a, 6).expect("room");
    step.append(&mut pages, b, 1).expect("room");
    step.finish(&pages).expect("alive");
    assert_eq!(step.packed(), [0, 6, 7, 6, 1, 0, 1, 2, -1, -1, -1, 0, 0]);
    let bytes: Vec<u8> = step.packed().iter().flat_map(|x| x.to_ne_bytes()).collect();
    assert_eq!(step.packed_bytes(), bytes);
    assert_eq!((step.max_query_len(), Step::new().max_query_len()), (6, 0));
    let layout = step.table_layout();
    assert_eq!(layout, TableLayout { sequences: 2, max_blocks: 2 });
    assert_eq!((layout.len(), layout.bytes()), (13, 52));
    assert_eq!(&step.packed()[layout.block_table()], step.block_table());
    assert_eq!(&step.packed()[layout.kv_lens()], step.kv_lens());
    assert_eq!(&step.packed()[layout.cu_seqlens_q()], step.cu_seqlens_q());
    let tables = step.tables();
    assert_eq!(tables.kv_lens.as_slice::<i32>(), Some(step.kv_lens()));
    assert_eq!(tables.block_table.shape(), [2, 2]);
    assert_eq!(tables.block_table.at(&[1, 1]), -1.0);

    // A layout with room for more: the others bring nothing.
    let larger = TableLayout { sequences: 4, max_blocks: 3 };
    let mut packed = vec![99; larger.len()];
    step.pack(&larger, &mut packed).expect("room");
    assert_eq!(packed[..9], [0, 6, 7, 7, 7, 6, 1, 0, 0]);
    assert_eq!(packed[9..21], [0, 1, -1, 2, -1, -1, -1, -1, -1, -1, -1, -1]);
    assert_eq!(packed[21..], [-1, -1, -1, -1, 0, 0, 0, 0]);
    let tables = larger.tables(Tensor::from(&packed)).expect("its buffer");
    let q = rows(0, 0..7, HEADS * DIM);
    let pool = rows(1, 0..16 * BLOCK, KV_HEADS * DIM);
    let pool = Tensor::new(&pool, [16, BLOCK, KV_HEADS, DIM]).expect("whole");
    let q = Tensor::new(&q, [7, HEADS, DIM]).expect("whole");
    let exact: Vec<f32> = attention(q, pool, pool, &step.attention()).expect("sound operands");
    let padded: Vec<f32> = attention(q, pool, pool, &tables.attention()).expect("sound operands");
    assert_eq!(exact, padded);

    let small = TableLayout { sequences: 2, max_blocks: 1 };
    let error = step.pack(&small, &mut vec![0; small.len()]).expect_err("too small").to_string();
    assert!(error.contains("room for TableLayout { sequences: 2, max_blocks: 2 }"), "{error}");
    let error = step.pack(&layout, &mut packed).expect_err("too long").to_string();
    assert_eq!(error, "`packed` is 29 elements long; allowed: 13");
    let error = layout.tables(Tensor::from(&packed)).expect_err("too long").to_string();
    assert!(error.starts_with("`packed` is i32[29] with strides [1]; allowed: i32[13]"), "{error}");
}

#[test]
fn sequences_that_share_pages_are_one_group() {
    let mut pages = PageAllocator::new(64, BLOCK).expect("sound sizes");
    let prompt = pages.create();
    let mut step = Step::new();
    step.append(&mut pages, prompt, 90).expect("room");
    step.finish(&pages).expect("alive");
    let mut pool = Pool {
        keys: vec![f32::NAN; 64 * BLOCK * KV_HEADS * DIM],
        values: vec![f32::NAN; 64 * BLOCK * KV_HEADS * DIM],
    };
    let mut texts = vec![(0..90).collect::<Vec<usize>>(); 3];
    pool.write(&step, &texts[0]);
    let others = [pages.fork(prompt).expect("alive"), pages.fork(prompt).expect("alive")];
    let sequences = [prompt, others[0], others[1]];
    for token in 0..3 {
        step.clear();
        let mut new = Vec::new();
        for (i, (&sequence, text)) in sequences.iter().zip(&mut texts).enumerate() {
            step.append(&mut pages, sequence, 1).expect("room");
            text.push(100 + 10 * i + token);
            new.push(100 + 10 * i + token);
        }
        step.finish(&pages).expect("alive");
        pool.write(&step, &new);
        assert_eq!(step.prefix_groups(), [0, 0, 0]);
        assert_eq!(step.prefix_lens(), [88, 0, 0]);
        let q = rows(0, new, HEADS * DIM);
        let q = Tensor::new(&q, [3, HEADS, DIM]).expect("whole");
        let shape = [64, BLOCK, KV_HEADS, DIM];
        let keys = Tensor::new(&pool.keys, shape).expect("whole");
        let values = Tensor::new(&pool.values, shape).expect("whole");
        let found: Vec<f32> =
            attention(q, keys, values, &step.grouped_attention()).expect("sound operands");
        let expected: Vec<f32> = texts.iter().flat_map(|text| alone(text, 1)).collect();
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{worst}");
    }
}

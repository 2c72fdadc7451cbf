//! Copies between the blocks of pools on the CPU: against an element at a time, through any
//! strides.

use regard::cpu::{Cpu, Inline};
use regard::format::BlockQ8_0;
use regard::paged::{BlockCopy, CopyBlocks, PageAllocator, Step};
use regard::{DType, MAX_RANK, TensorMut, f16};

const BLOCKS: usize = 6;
const SLOTS: usize = 4;

fn copies(list: &[[usize; 3]]) -> Vec<BlockCopy> {
    list.iter().map(|&[from, to, slots]| BlockCopy { from, to, slots }).collect()
}

/// The same copies, an element at a time. `at` is the place of an element of `shape`.
fn naive<T: Copy>(
    data: &mut [T],
    shape: &[usize],
    at: impl Fn(&[usize]) -> usize,
    copies: &[BlockCopy],
) {
    for copy in copies {
        let inside: usize = shape[1..].iter().product();
        for number in 0..inside {
            let (mut index, mut rest) = ([0; MAX_RANK], number);
            for dim in (1..shape.len()).rev() {
                index[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            if index[1] < copy.slots {
                index[0] = copy.from;
                let value = data[at(&index[..shape.len()])];
                index[0] = copy.to;
                data[at(&index[..shape.len()])] = value;
            }
        }
    }
}

/// Copies in one pool of this shape and these strides, of which the first element is at `first`.
fn check(shape: &[usize], strides: &[i64], first: usize, len: usize, copies: &[BlockCopy]) {
    let before: Vec<f16> = (0..len).map(|i| f16::from_f32(i as f32)).collect();
    for cpu in [Cpu::new().expect("a CPU"), Cpu::new().expect("a CPU").with_executor(Inline)] {
        let (mut found, mut expected) = (before.clone(), before.clone());
        naive(
            &mut expected,
            shape,
            |index| {
                let steps = index.iter().zip(strides).map(|(&i, &stride)| i as i64 * stride);
                (first as i64 + steps.sum::<i64>()) as usize
            },
            copies,
        );
        // SAFETY: the tests' views lie within the vector.
        let pool = unsafe {
            let first = found.as_mut_ptr().add(first).cast();
            TensorMut::from_raw(first, DType::F16, shape, Some(strides)).expect("a view")
        };
        cpu.copy_blocks(&mut CopyBlocks { pools: &mut [pool], copies }).expect("sound");
        assert_eq!(found, expected, "{shape:?} {strides:?}");
    }
}

#[test]
fn blocks_are_copied_in_order_through_any_strides() {
    // A block that was written is read, one that was read is overwritten, one is copied to itself.
    let list = copies(&[[0, 1, 4], [1, 2, 3], [3, 0, 1], [4, 4, 4], [5, 3, 0], [2, 5, 2]]);
    let (h, d) = (3, 8);
    let all = BLOCKS * SLOTS * h * d;
    let shape = [BLOCKS, SLOTS, h, d];
    let as_i64 = |strides: [usize; 4]| strides.map(|stride| stride as i64);
    // Heads inside slots, slots inside heads, interleaved with something else, and padded.
    check(&shape, &as_i64([SLOTS * h * d, h * d, d, 1]), 0, all, &list);
    check(&shape, &as_i64([SLOTS * h * d, d, SLOTS * d, 1]), 0, all, &list);
    check(&shape, &as_i64([2 * SLOTS * h * d, 2 * h * d, 2 * d, 1]), d, 2 * all, &list);
    check(&shape, &as_i64([SLOTS * h * 9, h * 9, 9, 1]), 0, all / 8 * 9, &list);
    check(&shape, &as_i64([SLOTS * h * 16, h * 16, 16, 2]), 1, 2 * all, &list);
    // The last block first in memory.
    let back = -((SLOTS * h * d) as i64);
    let last = (BLOCKS - 1) * SLOTS * h * d;
    check(&shape, &[back, (h * d) as i64, d as i64, 1], last, all, &list);
    // Scales per slot, and per page.
    check(&[BLOCKS, SLOTS, h], &[(SLOTS * h) as i64, h as i64, 1], 0, BLOCKS * SLOTS * h, &list);
    check(&[BLOCKS, SLOTS], &[SLOTS as i64, 1], 0, BLOCKS * SLOTS, &list);
}

#[test]
fn pools_of_a_cache_are_copied_together_with_their_scales() {
    let cpu = Cpu::new().expect("a CPU");
    let mut codes: Vec<i8> = (0..BLOCKS * SLOTS * 8).map(|i| i as i8).collect();
    let mut scales: Vec<f32> = (0..BLOCKS * SLOTS).map(|i| i as f32).collect();
    let mut pages: Vec<f32> = (0..BLOCKS).map(|i| i as f32).collect();
    let block = |i: usize| BlockQ8_0 { scale: f16::from_f32(i as f32), codes: [i as i8; 32] };
    let mut blocks: Vec<BlockQ8_0> = (0..BLOCKS * SLOTS).map(block).collect();
    let mut pools = [
        TensorMut::new(&mut codes, [BLOCKS, SLOTS, 1, 8]).expect("codes"),
        TensorMut::new(&mut scales, [BLOCKS, SLOTS, 1]).expect("scales"),
        TensorMut::new(&mut pages, [BLOCKS, 1, 1]).expect("a scale per page"),
        TensorMut::new(&mut blocks, [BLOCKS, SLOTS, 1, 1]).expect("blocks"),
    ];
    let list = copies(&[[1, 4, 3], [2, 5, 4]]);
    cpu.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: &list }).expect("sound");
    let slot = |from: usize| (from * 8..from * 8 + 24).map(|i| i as i8).collect::<Vec<_>>();
    assert_eq!(codes[4 * 32..4 * 32 + 24], slot(SLOTS));
    assert_eq!(codes[4 * 32 + 24], (4 * 32 + 24) as u8 as i8, "the last slot stays");
    assert_eq!(scales[16..20], [4.0, 5.0, 6.0, 19.0]);
    assert_eq!(pages, [0.0, 1.0, 2.0, 3.0, 1.0, 2.0]);
    assert_eq!(blocks[20..].iter().map(|b| b.codes[0]).collect::<Vec<_>>(), [8, 9, 10, 11]);
}

/// Large enough for several threads.
#[test]
fn layers_are_copied_by_all_threads() {
    let (blocks, row) = (64, 16 * 1024);
    let mut layers: Vec<Vec<f32>> =
        (0..6).map(|layer| (0..blocks * row).map(|i| (i + layer) as f32).collect()).collect();
    let mut pools: Vec<_> = layers
        .iter_mut()
        .map(|layer| TensorMut::new(layer, [blocks, 16, 8, 128]).expect("a pool"))
        .collect();
    let list: Vec<_> = (1..blocks).map(|to| BlockCopy { from: to - 1, to, slots: 16 }).collect();
    let cpu = Cpu::new().expect("a CPU");
    cpu.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: &list }).expect("sound");
    for layer in &layers {
        assert!(
            layer.chunks(row).all(|block| block == &layer[..row]),
            "in order: all as the first"
        );
    }
}

#[test]
fn bad_pools_and_copies_are_refused_and_nothing_is_copied() {
    let cpu = Cpu::new().expect("a CPU");
    let before: Vec<f32> = (0..BLOCKS * SLOTS * 2).map(|i| i as f32).collect();
    let refused = |shapes: [&[usize]; 2], strides: Option<&[i64]>, list: &[[usize; 3]]| {
        let (mut a, mut b) = (before.clone(), before.clone());
        let mut pools = [
            TensorMut::from_slice(&mut a, shapes[0], None).expect("a view"),
            // SAFETY: no shape below has more elements than the vector.
            unsafe { TensorMut::from_raw(b.as_mut_ptr().cast(), DType::F32, shapes[1], strides) }
                .expect("a view"),
        ];
        let list = copies(list);
        let result = cpu.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: &list });
        assert!(a == before && b == before, "nothing is copied");
        result.expect_err("refused").to_string()
    };
    let good: &[usize] = &[BLOCKS, SLOTS, 2];
    let words = refused([good, good], None, &[[0, 1, 4], [0, 6, 4]]);
    assert_eq!(
        words,
        "`copies[1]` is 4 slots of block 0 to block 6; allowed: blocks below 6, at most 4 slots"
    );
    assert!(refused([good, good], None, &[[6, 0, 1]]).starts_with("`copies[0]` is"));
    assert!(refused([good, good], None, &[[1, 0, 5]]).contains("at most 4 slots"));
    for shape in [&[5, SLOTS, 2][..], &[BLOCKS, 2, 2], &[BLOCKS], &[1, 1, 2]] {
        let words = refused([good, shape], None, &[[0, 1, 1]]);
        assert!(words.starts_with("`pools[1]` is"), "{words}");
        assert!(words.contains("[6, 4 or 1, ...]"), "{words}");
    }
    let words = refused([good, good], Some(&[0, 2, 1]), &[[0, 1, 1]]);
    assert!(words.starts_with("`pools[1]` is a view"), "{words}");
    // Nothing to do is nothing wrong.
    let nothing = &mut CopyBlocks { pools: &mut [], copies: &copies(&[[9, 9, 9]]) };
    cpu.copy_blocks(nothing).expect("no pools");
}

/// Two sequences share a half-filled block; the step that appends to one copies it first.
#[test]
fn the_copies_of_a_step_are_made_as_they_are() {
    let mut pages = PageAllocator::new(BLOCKS, SLOTS).expect("sound sizes");
    let first = pages.create();
    let mut step = Step::new();
    step.append(&mut pages, first, 6).expect("room");
    step.finish(&pages).expect("alive");
    let second = pages.fork(first).expect("alive");
    step.clear();
    step.append(&mut pages, second, 1).expect("room");
    step.finish(&pages).expect("alive");
    let mut keys: Vec<f32> = (0..BLOCKS * SLOTS).map(|i| i as f32).collect();
    let mut pools = [TensorMut::new(&mut keys, [BLOCKS, SLOTS, 1, 1]).expect("a pool")];
    let mut copy = CopyBlocks { pools: &mut pools, copies: step.copies() };
    Cpu::new().expect("a CPU").copy_blocks(&mut copy).expect("sound");
    let [copied] = step.copies() else { panic!("one copy") };
    assert_eq!((copied.from, copied.slots), (1, 2));
    let to = copied.to * SLOTS;
    assert_eq!(keys[to..to + 3], [4.0, 5.0, (to + 2) as f32]);
}

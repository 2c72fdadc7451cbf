//! Hostile case files: every seed, broken in every way of a fixed list. For any bytes the reader
//! returns a case or an error, and takes memory in proportion to the file. An accepted case runs or
//! is refused with a message. The same seeds start the fuzz target.

mod seeds;

use regard::{Plan, Problem};
use regard_cases::file;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts the bytes that the current thread allocates: a small file must not make the reader
/// reserve gigabytes.
struct Counting;

thread_local! {
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator; the counter neither allocates nor
// unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ASKED.try_with(|asked| asked.set(asked.get().saturating_add(layout.size())));
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that reading a file may ask for in all: its size a few times over, and some kilobytes for
/// names, maps and messages.
fn allowance(bytes: &[u8]) -> usize {
    64 * bytes.len() + (64 << 10)
}

/// Maximum multiply-adds of a case that is run.
const MAX_WORK: usize = 1 << 16;

/// Reads the bytes. An accepted file is planned and, if it is small, run. Returns whether it was
/// accepted.
fn survive(bytes: &[u8], what: &str) -> bool {
    let before = ASKED.get();
    let read = file::from_bytes("hostile", bytes);
    let asked = ASKED.get() - before;
    assert!(
        asked <= allowance(bytes),
        "{what}: {asked} bytes asked for by a file of {}",
        bytes.len()
    );
    match read {
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() < 2000, "{what}: a message of {} bytes", message.len());
            false
        }
        Ok(case) => {
            let _ = case.run(|inputs, outputs| {
                let problem = Problem::from_operands(inputs, outputs)?;
                let work =
                    problem.rows().saturating_mul(problem.kv_len).saturating_mul(problem.value_dim);
                if problem.batch <= 64 && work <= MAX_WORK {
                    let plan = Plan::for_operands(inputs, outputs)?;
                    let mut workspace = vec![0xa5; plan.workspace_bytes()];
                    plan.run(inputs, outputs, &mut workspace)?;
                }
                Ok(())
            });
            let again = file::to_bytes(&case).expect("what was read can be written");
            let reread = file::from_bytes("hostile", &again).expect("what was written can be read");
            let once_more = file::to_bytes(&reread).expect("and written again");
            assert_eq!(once_more, again, "{what}: reading and writing settles");
            true
        }
    }
}

fn seed_files() -> Vec<(String, Vec<u8>)> {
    let bytes = |case: &regard_cases::Case| file::to_bytes(case).expect("a sound case");
    seeds::cases().iter().map(|case| (case.name.clone(), bytes(case))).collect()
}

fn header_length(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize
}

/// The file with its header's text put through `change`, the length in front put right.
fn with_header(bytes: &[u8], change: impl Fn(&str) -> String) -> Vec<u8> {
    let (header, data) = bytes[8..].split_at(header_length(bytes));
    let header = change(std::str::from_utf8(header).expect("JSON"));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn the_seeds_are_sound_and_run() {
    for case in seeds::cases() {
        let bytes = file::to_bytes(&case).expect("a sound case");
        let again = file::from_bytes(&case.name, &bytes).expect("readable");
        let ran = again.run(|inputs, outputs| {
            let plan = Plan::for_operands(inputs, outputs)?;
            plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()])
        });
        ran.unwrap_or_else(|error| panic!("{}: {error}", case.name));
    }
}

#[test]
fn cut_short_or_made_longer() {
    for (name, bytes) in seed_files() {
        for length in 0..bytes.len() {
            assert!(!survive(&bytes[..length], &format!("{name} cut to {length}")));
        }
        for extra in [1, 8, 4096] {
            let longer = [&bytes[..], &vec![0; extra]].concat();
            assert!(!survive(&longer, &format!("{name} with {extra} bytes more")));
        }
    }
}

#[test]
fn any_byte_replaced() {
    for (name, bytes) in seed_files() {
        for place in 0..bytes.len() {
            for byte in *b"\0\x01\x7f\x80\xff\"\\{}[],:-.019eE nq" {
                let mut changed = bytes.clone();
                changed[place] = byte;
                survive(&changed, &format!("{name} with byte {place} set to {byte:#04x}"));
            }
        }
    }
}

#[test]
fn any_byte_left_out_or_doubled() {
    for (name, bytes) in seed_files() {
        let header = header_length(&bytes);
        for place in 0..header {
            let without = with_header(&bytes, |text| [&text[..place], &text[place + 1..]].concat());
            survive(&without, &format!("{name} without header byte {place}"));
            let doubled = with_header(&bytes, |text| [&text[..=place], &text[place..]].concat());
            survive(&doubled, &format!("{name} with header byte {place} twice"));
        }
    }
}

#[test]
fn any_number_of_the_header_replaced() {
    const NUMBERS: [&str; 22] = [
        "0",
        "1",
        "2",
        "3",
        "-1",
        "8",
        "576",
        "577",
        "65536",
        "16777216",
        "2147483647",
        "2147483648",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
        "1e3",
        "1e999",
        "0.5",
        "null",
        "\"1\"",
        "[]",
    ];
    for (name, bytes) in seed_files() {
        let header = header_length(&bytes);
        let text = std::str::from_utf8(&bytes[8..8 + header]).expect("JSON").to_string();
        let digit = |i: usize| text.as_bytes().get(i).is_some_and(u8::is_ascii_digit);
        for start in (0..text.len()).filter(|&i| digit(i) && (i == 0 || !digit(i - 1))) {
            let end = (start..).find(|&i| !digit(i)).expect("a header ends with a brace");
            for number in NUMBERS {
                let changed =
                    with_header(&bytes, |text| [&text[..start], number, &text[end..]].concat());
                survive(&changed, &format!("{name} with {number} at header byte {start}"));
            }
        }
    }
}

#[test]
fn any_four_bytes_of_the_data_replaced() {
    for (name, bytes) in seed_files() {
        for place in (8 + header_length(&bytes)..bytes.len().saturating_sub(3)).step_by(2) {
            for number in [0i32, 1, -1, 4, 5, 1 << 30, i32::MAX, i32::MIN, 0x7f80_0000, 0x7fc0_0000]
            {
                let mut changed = bytes.clone();
                changed[place..place + 4].copy_from_slice(&number.to_le_bytes());
                survive(&changed, &format!("{name} with {number:#x} at byte {place}"));
            }
        }
    }
}

#[test]
fn names_exchanged_removed_and_repeated() {
    const NAMES: [&str; 20] = [
        "q",
        "k",
        "v",
        "mask",
        "alibi_slopes",
        "sinks",
        "kv_lens",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "block_table",
        "tree_mask",
        "out",
        "lse",
        "__metadata__",
        "attention",
        "dtype",
        "shape",
        "data_offsets",
        "",
        "\\u0000",
    ];
    for (name, bytes) in seed_files() {
        for from in NAMES {
            for to in NAMES {
                let changed = with_header(&bytes, |text| {
                    text.replace(&format!("\"{from}\":"), &format!("\"{to}\":"))
                });
                survive(&changed, &format!("{name} with {from:?} called {to:?}"));
            }
        }
        for dtype in ["F64", "F32", "F16", "BF16", "I32", "I64", "U8", "BOOL", "F8_E4M3", "f32", ""]
        {
            for present in ["F32", "F16", "BF16", "I32", "BOOL"] {
                let changed = with_header(&bytes, |text| text.replace(present, dtype));
                survive(&changed, &format!("{name} with {present} called {dtype:?}"));
            }
        }
    }
}

#[test]
fn headers_that_lie_about_themselves() {
    for (name, bytes) in seed_files() {
        let length = header_length(&bytes) as u64;
        for claim in [
            0,
            1,
            length - 1,
            length + 1,
            bytes.len() as u64,
            100_000_000,
            1 << 32,
            1 << 63,
            u64::MAX,
        ] {
            let mut changed = bytes.clone();
            changed[..8].copy_from_slice(&claim.to_le_bytes());
            assert!(!survive(&changed, &format!("{name} with a header of {claim} bytes")));
        }
        let nested = with_header(&bytes, |_| "[".repeat(50_000));
        assert!(!survive(&nested, &format!("{name} with a nested header")));
        let deep = with_header(&bytes, |text| {
            text.replace("\"{", &format!("\"{{\\\"window\\\":{},", "[".repeat(50_000)))
        });
        assert!(!survive(&deep, &format!("{name} with nested options")));
    }
}

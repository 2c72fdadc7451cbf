//! A simulation of sharded decode and ring prefill, from the times of one GPU and of its links by
//! themselves. It predicts the measured times of two GPUs, and with `--nocapture` prints the tables
//! of docs/scaling.md:
//!
//! ```text
//! cargo test --release -p regard-nccl --test scaling -- --nocapture
//! ```

/// Query heads, key/value heads and head dim of all rows: 32/8, D 128, bf16.
const HEADS: f64 = 32.0;
const KV_HEADS: f64 = 8.0;
const DIM: f64 = 128.0;

/// Microseconds and bytes.
const MICRO: f64 = 1e-6;

/// One H200, as `shards` measured it alone on 2026-11-23.
#[derive(Clone, Copy)]
struct Gpu {
    /// Seconds of a decode launch apart from reading keys and values.
    launch: f64,
    /// Bytes of keys and values per second: from decode over 131072 and 1048576 keys.
    read: f64,
    /// Operations per second of causal prefill.
    prefill: f64,
    /// Bytes per second of a merge, which reads parts and writes outputs.
    merge: f64,
    /// Multiprocessors.
    multiprocessors: f64,
}

const H200: Gpu = Gpu {
    launch: 4.6 * MICRO,
    read: 4.44e12,
    prefill: 672e12,
    merge: 3.5e12,
    multiprocessors: 132.0,
};

/// The links between ranks, of NCCL.
#[derive(Clone, Copy)]
struct Links {
    /// Seconds of an all-gather of few bytes.
    gather: f64,
    /// Seconds of an all-to-all of few bytes.
    exchange: f64,
    /// Bytes per second that a rank receives in these.
    small: f64,
    /// Seconds of a ring step of few bytes, and bytes per second of a large one.
    ring: f64,
    large: f64,
    /// Multiprocessors that a transfer takes.
    ctas: f64,
}

/// NVLink between two H200s of a host, as `shards links` measured it on 2026-11-23.
const NVLINK_2: Links = Links {
    gather: 10.3 * MICRO,
    exchange: 15.3 * MICRO,
    small: 130e9,
    ring: 150.0 * MICRO,
    large: 325e9,
    ctas: 24.0,
};

/// NVLink between four H200s of a host: NCCL 2.28 through PyTorch, multicast off, 2026-11-22.
const NVLINK_4: Links = Links { gather: 10.7 * MICRO, exchange: 12.6 * MICRO, ..NVLINK_2 };

/// One adapter of 400 Gbit/s per GPU. Not measured: 80% of the line, and 30 us more per exchange.
const ADAPTER: Links = Links {
    gather: 40.0 * MICRO,
    exchange: 45.0 * MICRO,
    small: 40e9,
    ring: 180.0 * MICRO,
    large: 40e9,
    ctas: 24.0,
};

impl Links {
    /// Eight GPUs of a host are not measured: taken as four.
    fn for_host(ranks: f64) -> Links {
        if ranks <= 2.0 { NVLINK_2 } else { NVLINK_4 }
    }
}

/// Seconds of a decode step.
fn decode(gpu: Gpu, links: Links, ranks: f64, keys: f64, batch: f64) -> f64 {
    let bytes = 2.0 * keys * batch * KV_HEADS * DIM * 2.0;
    if ranks == 1.0 {
        return gpu.launch + bytes / gpu.read;
    }
    let rows = HEADS * batch;
    let others = (ranks - 1.0) / ranks;
    let gather = links.gather + rows * DIM * 2.0 * others / links.small;
    let partial = rows * (DIM + 1.0) * 4.0;
    let exchange = links.exchange + partial * others / links.small;
    let merge = 3.0 * MICRO + partial / gpu.merge;
    gather + gpu.launch + bytes / ranks / gpu.read + exchange + merge
}

/// Seconds of a causal prefill: the ring step by step, with transfers that take multiprocessors
/// from the kernels that they overlap with.
fn prefill(gpu: Gpu, links: Links, ranks: usize, len: f64) -> f64 {
    let n = ranks as f64;
    let work = 2.0 * HEADS * DIM * len * len;
    let step = work / (n * n) / gpu.prefill;
    if ranks == 1 {
        return step;
    }
    let transfer = links.ring + 2.0 * (len / n) * KV_HEADS * DIM * 2.0 / links.large;
    // Both are in order: the transfer of step s begins when the kernels of step s - 1 have ended,
    // and brings the keys of step s + 1.
    let (mut computed, mut transferred) = (0.0f64, 0.0f64);
    for s in 0..ranks {
        let begin = computed.max(transferred);
        if s + 1 < ranks {
            transferred = begin + transfer;
            // Time that the transfer's multiprocessors do not compute.
            let lost = transfer.min(step) * links.ctas / gpu.multiprocessors;
            computed = begin + step + lost;
        } else {
            computed = begin + step;
        }
    }
    let out = len / n * HEADS * DIM * 2.0;
    computed + (n + 1.0) * out / gpu.merge
}

fn within(what: &str, predicted: f64, measured: f64, bound: f64) {
    let error = predicted / measured - 1.0;
    println!(
        "{what}: predicted {:.1} us, measured {:.1} us ({:+.1}%)",
        predicted / MICRO,
        measured / MICRO,
        100.0 * error
    );
    assert!(error.abs() <= bound, "{what}: predicted {predicted}, measured {measured}");
}

/// Keys, sequences, and microseconds on one GPU and on two.
const DECODE: [(f64, f64, f64, f64); 4] = [
    (131072.0, 1.0, 125.4, 92.2),
    (131072.0, 8.0, 965.2, 517.8),
    (1048576.0, 1.0, 971.2, 514.0),
    (1048576.0, 8.0, 7706.4, 3910.4),
];

/// Tokens, and milliseconds on one GPU and on two.
const PREFILL: [(f64, f64, f64); 2] = [(32768.0, 13.02, 6.61), (131072.0, 206.89, 107.84)];

/// The times that `shards decode` and `shards prefill` printed on two H200s (docs/scaling.md).
#[test]
fn measured_times_are_predicted() {
    for (keys, batch, one, two) in DECODE {
        let what = format!("decode, {keys} keys, B {batch}");
        let found = decode(H200, NVLINK_2, 1.0, keys, batch);
        within(&format!("{what}, 1 GPU"), found, one * MICRO, 0.05);
        let found = decode(H200, NVLINK_2, 2.0, keys, batch);
        within(&format!("{what}, 2 GPUs"), found, two * MICRO, 0.15);
    }
    for (len, one, two) in PREFILL {
        let what = format!("prefill, {len} tokens");
        let found = prefill(H200, NVLINK_2, 1, len);
        within(&format!("{what}, 1 GPU"), found, one * 1e-3, 0.05);
        let found = prefill(H200, NVLINK_2, 2, len);
        within(&format!("{what}, 2 GPUs"), found, two * 1e-3, 0.15);
    }
}

/// Prints the estimates of docs/scaling.md for more GPUs, and checks that the simulation stays
/// within physical limits.
#[test]
fn more_gpus_are_predicted() {
    for (keys, batch) in [(1048576.0, 1.0), (1048576.0, 8.0), (10485760.0, 1.0)] {
        let one = decode(H200, NVLINK_2, 1.0, keys, batch);
        print!("decode, {keys} keys, B {batch}: 1 GPU {:.0} us", one / MICRO);
        for (ranks, links, name) in [
            (2.0, Links::for_host(2.0), ""),
            (4.0, Links::for_host(4.0), ""),
            (8.0, Links::for_host(8.0), ""),
            (16.0, ADAPTER, " of 2 hosts"),
            (32.0, ADAPTER, " of 4 hosts"),
        ] {
            let many = decode(H200, links, ranks, keys, batch);
            print!("; {ranks}{name} {:.0} us, {:.2}x", many / MICRO, one / many);
            assert!(one / many <= ranks);
        }
        println!();
    }
    for len in [32768.0, 131072.0, 1048576.0, 10485760.0] {
        let one = prefill(H200, NVLINK_2, 1, len);
        print!("prefill, {len} tokens: 1 GPU {:.1} ms", one * 1e3);
        for (ranks, links, name) in [
            (2, Links::for_host(2.0), ""),
            (4, Links::for_host(4.0), ""),
            (8, Links::for_host(8.0), ""),
            (16, ADAPTER, " of 2 hosts"),
            (32, ADAPTER, " of 4 hosts"),
        ] {
            let many = prefill(H200, links, ranks, len);
            print!("; {ranks}{name} {:.1} ms, {:.2}x", many * 1e3, one / many);
            assert!(one / many <= ranks as f64);
        }
        println!();
    }
    // The tokens per rank from which on a ring hides its transfers.
    for (links, name) in [(NVLINK_4, "NVLink"), (ADAPTER, "400 Gbit/s")] {
        let tokens = 2.0 * KV_HEADS * H200.prefill / (HEADS * links.large);
        println!("{name}: transfers are hidden from {tokens:.0} tokens per rank on");
    }
}

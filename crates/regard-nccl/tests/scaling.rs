//! A simulation of sharded decode and ring prefill, from the times of one GPU and of its links by
//! themselves. It predicts the measured times of two and of four GPUs, and with `--nocapture`
//! prints the tables of docs/scaling.md:
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

/// One H200, as `shards` measured it alone on 2026-11-27.
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
    prefill: 665e12,
    merge: 3.5e12,
    multiprocessors: 132.0,
};

/// The links between ranks, and a transport over them.
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

/// NVLink between H200s of a host by NCCL 2.28, multicast off, as `shards links` measured it.
const NCCL: Links = Links {
    gather: 10.3 * MICRO,
    exchange: 15.0 * MICRO,
    small: 130e9,
    ring: 150.0 * MICRO,
    large: 325e9,
    ctas: 24.0,
};

/// The same links by peer memory: copy engines take no multiprocessors.
const PEERS: Links = Links {
    gather: 4.3 * MICRO,
    exchange: 4.7 * MICRO,
    small: 100e9,
    ring: 45.0 * MICRO,
    large: 390e9,
    ctas: 0.0,
};

/// One adapter of 400 Gbit/s per GPU. Not measured: 80% of the line, and 30 us more per exchange.
const ADAPTER: Links = Links {
    gather: 40.0 * MICRO,
    exchange: 45.0 * MICRO,
    small: 40e9,
    ring: 180.0 * MICRO,
    large: 40e9,
    ctas: 24.0,
};

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

/// Rows of a tile.
const TILE: f64 = 128.0;

/// Seconds of a causal prefill: the ring step by step, with transfers that take multiprocessors
/// from the kernels that they overlap with. The last tiles of a call leave half of the
/// multiprocessors idle.
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
    let chunk = len / (2.0 * n);
    let tile = |keys: f64| 4.0 * TILE * keys * DIM * gpu.multiprocessors / gpu.prefill;
    for s in 0..ranks {
        // In the first step, full attention of the late rows to the early keys has tiles to fill;
        // causal calls begin with the longest ones.
        let step = step + tile(if s == 0 { chunk } else { 2.0 * chunk }) / 2.0;
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

/// Ranks, keys, sequences, and microseconds by NCCL and by peer memory.
const DECODE: [(f64, f64, f64, f64, f64); 8] = [
    (2.0, 131072.0, 1.0, 92.1, 78.5),
    (2.0, 131072.0, 8.0, 518.0, 504.7),
    (2.0, 1048576.0, 1.0, 514.2, 500.8),
    (2.0, 1048576.0, 8.0, 3909.1, 3900.1),
    (4.0, 131072.0, 1.0, 64.5, 52.5),
    (4.0, 131072.0, 8.0, 279.4, 269.0),
    (4.0, 1048576.0, 1.0, 276.1, 263.9),
    (4.0, 1048576.0, 8.0, 1987.5, 1972.1),
];

/// Keys, sequences, and microseconds on one GPU.
const DECODE_ON_ONE: [(f64, f64, f64); 4] = [
    (131072.0, 1.0, 125.3),
    (131072.0, 8.0, 962.1),
    (1048576.0, 1.0, 969.5),
    (1048576.0, 8.0, 7686.0),
];

/// Ranks, tokens, and milliseconds by NCCL and by peer memory.
const PREFILL: [(usize, f64, f64, f64); 4] = [
    (2, 32768.0, 7.28, 7.19),
    (2, 131072.0, 107.84, 110.50),
    (4, 32768.0, 4.08, 3.75),
    (4, 131072.0, 56.35, 55.29),
];

/// Tokens, and milliseconds on one GPU.
const PREFILL_ON_ONE: [(f64, f64); 2] = [(32768.0, 13.38), (131072.0, 213.8)];

/// The times that `shards decode` and `shards prefill` printed on H200s (docs/scaling.md).
#[test]
fn measured_times_are_predicted() {
    for (keys, batch, measured) in DECODE_ON_ONE {
        let found = decode(H200, NCCL, 1.0, keys, batch);
        within(&format!("decode, {keys} keys, B {batch}, 1 GPU"), found, measured * MICRO, 0.05);
    }
    for (ranks, keys, batch, by_nccl, by_peers) in DECODE {
        for (links, name, measured) in [(NCCL, "NCCL", by_nccl), (PEERS, "peers", by_peers)] {
            let what = format!("decode, {keys} keys, B {batch}, {ranks} GPUs, {name}");
            let found = decode(H200, links, ranks, keys, batch);
            within(&what, found, measured * MICRO, 0.15);
        }
    }
    for (len, measured) in PREFILL_ON_ONE {
        let found = prefill(H200, NCCL, 1, len);
        within(&format!("prefill, {len} tokens, 1 GPU"), found, measured * 1e-3, 0.05);
    }
    for (ranks, len, by_nccl, by_peers) in PREFILL {
        for (links, name, measured) in [(NCCL, "NCCL", by_nccl), (PEERS, "peers", by_peers)] {
            let what = format!("prefill, {len} tokens, {ranks} GPUs, {name}");
            let found = prefill(H200, links, ranks, len);
            within(&what, found, measured * 1e-3, 0.15);
        }
    }
}

/// Prints the estimates of docs/scaling.md for more GPUs, and checks that the simulation stays
/// within physical limits.
#[test]
fn more_gpus_are_predicted() {
    const GROUPS: [(usize, Links, &str); 6] = [
        (2, PEERS, ""),
        (4, PEERS, ""),
        (8, PEERS, ""),
        (8, NCCL, " by NCCL"),
        (16, ADAPTER, " of 2 hosts"),
        (32, ADAPTER, " of 4 hosts"),
    ];
    for (keys, batch) in [(1048576.0, 1.0), (1048576.0, 8.0), (10485760.0, 1.0)] {
        let one = decode(H200, NCCL, 1.0, keys, batch);
        print!("decode, {keys} keys, B {batch}: 1 GPU {:.0} us", one / MICRO);
        for (ranks, links, name) in GROUPS {
            let many = decode(H200, links, ranks as f64, keys, batch);
            print!("; {ranks}{name} {:.0} us, {:.2}x", many / MICRO, one / many);
            assert!(one / many <= ranks as f64);
        }
        println!();
    }
    for len in [32768.0, 131072.0, 1048576.0, 10485760.0] {
        let one = prefill(H200, NCCL, 1, len);
        print!("prefill, {len} tokens: 1 GPU {:.1} ms", one * 1e3);
        for (ranks, links, name) in GROUPS {
            let many = prefill(H200, links, ranks, len);
            print!("; {ranks}{name} {:.1} ms, {:.2}x", many * 1e3, one / many);
            assert!(one / many <= ranks as f64);
        }
        println!();
    }
    // The tokens per rank from which on a ring hides its transfers.
    for (links, name) in [(PEERS, "NVLink"), (ADAPTER, "400 Gbit/s")] {
        let tokens = 2.0 * KV_HEADS * H200.prefill / (HEADS * links.large);
        println!("{name}: transfers are hidden from {tokens:.0} tokens per rank on");
    }
}

//! candle's fused CPU attention on the shapes of `regard bench`, timed by the same rules, into the
//! same result file.
//!
//! `RAYON_NUM_THREADS=2 cargo run --release -- FILE f32,bf16,f16 SECONDS WAIT [NAME...]`

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};
use serde_json::{Value, json};
use std::time::Instant;

/// Name, batch, query heads, key/value heads, head dim, query length, key length, causal.
type Shape = (&'static str, usize, usize, usize, usize, usize, usize, bool);

const SHAPES: [Shape; 11] = [
    ("p2048", 1, 32, 8, 128, 2048, 2048, true),
    ("p512", 1, 32, 8, 128, 512, 512, true),
    ("p1024d64", 1, 9, 3, 64, 1024, 1024, true),
    ("enc512", 1, 12, 12, 64, 512, 512, false),
    ("p1024d256", 1, 16, 8, 256, 1024, 1024, true),
    ("d4k", 1, 32, 8, 128, 1, 4096, false),
    ("d32k", 1, 32, 8, 128, 1, 32768, false),
    ("d4kb8", 8, 32, 8, 128, 1, 4096, false),
    ("d2kd64", 1, 9, 3, 64, 1, 2048, false),
    ("v8", 1, 32, 8, 128, 8, 4096, true),
    ("tiny", 1, 9, 3, 64, 1, 64, false),
];

/// Bytes of keys and values to rotate over, and the maximum query tokens per sequence to rotate at.
const ROTATED_BYTES: usize = 400_000_000;
const ROTATED_TOKENS: usize = 16;

/// Maximum seconds of warm-up runs and of measured runs, each.
const WARM_UP_LIMIT: f64 = 5.0;
const LIMIT: f64 = 25.0;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, file, dtypes, seconds, wait, names @ ..] = &arguments[..] else {
        candle_core::bail!("usage: regard-peer-candle FILE TYPES SECONDS WAIT [NAME...]");
    };
    let (Ok(seconds), Ok(wait)) = (seconds.parse::<f64>(), wait.parse::<f64>()) else {
        candle_core::bail!("{seconds} and {wait} are not numbers of seconds")
    };
    if let Some(name) = names.iter().find(|name| !SHAPES.iter().any(|shape| shape.0 == **name)) {
        candle_core::bail!("no shape {name}");
    }
    let mut results = Vec::new();
    for shape in
        SHAPES.iter().filter(|shape| names.is_empty() || names.iter().any(|name| name == shape.0))
    {
        for dtype in dtypes.split(',') {
            results.push(measure(shape, dtype, seconds, wait)?);
        }
    }
    std::fs::write(
        file,
        serde_json::to_string_pretty(&results).map_err(candle_core::Error::wrap)? + "\n",
    )?;
    Ok(())
}

fn attend(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, mask: AttnMask) -> Result<Tensor> {
    match q.dtype() {
        DType::F16 => flash_attn::<f16>(q, k, v, scale, mask, None, None),
        DType::BF16 => flash_attn::<bf16>(q, k, v, scale, mask, None, None),
        _ => flash_attn::<f32>(q, k, v, scale, mask, None, None),
    }
}

fn measure(shape: &Shape, dtype: &str, seconds: f64, wait: f64) -> Result<Value> {
    let &(name, batch, heads, kv_heads, dim, queries, keys, causal) = shape;
    let kind = match dtype {
        "f32" => DType::F32,
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        _ => candle_core::bail!("no type {dtype}; there are f32, bf16 and f16"),
    };
    let normal = |rows: usize, heads: usize| {
        Tensor::randn(0f32, 1f32, (batch, rows, heads, dim), &Device::Cpu)?.to_dtype(kind)
    };
    let (q, k, v) = (normal(queries, heads)?, normal(keys, kv_heads)?, normal(keys, kv_heads)?);
    let kv_bytes = 2 * batch * kv_heads * keys * dim * kind.size_in_bytes();
    let rotate = queries <= ROTATED_TOKENS && name != "tiny";
    let copies = if rotate { ROTATED_BYTES.div_ceil(kv_bytes) } else { 1 };
    let mut pairs = vec![(k.clone(), v.clone())];
    for _ in 1..copies {
        pairs.push((k.copy()?, v.copy()?));
    }
    let scale = 1.0 / (dim as f32).sqrt();
    let mask = || match (causal, queries) {
        (true, _) => AttnMask::causal_with_offset(keys - queries),
        // One query that sees everything: what candle's decode path is chosen by.
        (false, 1) => AttnMask::causal_with_offset(keys - 1),
        (false, _) => AttnMask::None,
    };

    let out = attend(&q, &k, &v, scale, mask())?;
    let max_error = largest_error(shape, &q, &k, &v, &out)?;
    let mut turn = pairs.iter().cycle();
    let mut sample = |calls: usize| -> Result<f64> {
        let begin = Instant::now();
        for (k, v) in turn.by_ref().take(calls) {
            attend(&q, k, v, scale, mask())?;
        }
        Ok(begin.elapsed().as_secs_f64() / calls as f64)
    };
    wait_for_quiet(wait);
    let mut warm = Vec::new();
    while warm.len() < 3 && warm.iter().sum::<f64>() < WARM_UP_LIMIT {
        warm.push(sample(1)?);
    }
    warm.sort_by(f64::total_cmp);
    let calls = (50e-6 / warm[(warm.len() - 1) / 2]).ceil().clamp(1.0, 1000.0) as usize;
    let load = Load::now();
    let (mut times, started, mut past) = (Vec::new(), Instant::now(), 0.0);
    while past < seconds || (times.len() < 5 && past < LIMIT) {
        times.push(sample(calls)?);
        past = started.elapsed().as_secs_f64();
    }
    let busy_elsewhere = load.others();
    times.sort_by(f64::total_cmp);

    let median = times[(times.len() - 1) / 2];
    let pairs = match causal {
        true if queries == keys => queries * keys / 2,
        true => (0..queries).map(|row| keys - queries + row + 1).sum(),
        false => queries * keys,
    };
    let gflops = (4 * batch * heads * dim * pairs) as f64 / median / 1e9;
    let gbytes = kv_bytes as f64 / median / 1e9;
    println!(
        "candle {name:10} {dtype:5} {:10.3} ms {gflops:8.1} GFLOP/s {gbytes:7.2} GB/s  error \
         {max_error:.1e}  others busy {:.1}",
        median * 1e3,
        busy_elsewhere.unwrap_or(f64::NAN)
    );
    Ok(json!({
        "name": name,
        "base": name,
        "query_tokens": queries,
        "peer": "candle-nn 0.11.1",
        "device": "cpu",
        "machine": cpu_model(),
        "threads": candle_core::utils::get_num_threads(),
        "dtype": dtype,
        "copies": copies,
        "seconds": median,
        "fastest": times[0],
        "quartiles": [times[times.len() / 4], times[times.len() * 3 / 4]],
        "runs": times.len(),
        "gflops": gflops,
        "gbytes_per_second": gbytes,
        "max_error": max_error,
        "busy_elsewhere": busy_elsewhere,
    }))
}

/// Against f64 on a few rows; `out` is `[batch, heads, queries, dim]`.
fn largest_error(shape: &Shape, q: &Tensor, k: &Tensor, v: &Tensor, out: &Tensor) -> Result<f64> {
    let &(_, _, heads, kv_heads, dim, queries, keys, causal) = shape;
    let first = |x: &Tensor| x.get(0)?.to_dtype(DType::F32)?.to_vec3::<f32>();
    let (q, k, v, out) = (first(q)?, first(k)?, first(v)?, first(out)?);
    let mut worst = 0f64;
    for head in [0, heads / 2, heads - 1] {
        let kv_head = head / (heads / kv_heads);
        for row in [0, queries / 3, queries - 1] {
            let end = if causal { keys - queries + row + 1 } else { keys };
            let score = |key: usize| {
                let products = q[row][head].iter().zip(&k[key][kv_head]);
                products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                    / (dim as f64).sqrt()
            };
            let scores: Vec<f64> = (0..end).map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (i, found) in out[head][row].iter().enumerate() {
                let products = weights.iter().enumerate();
                let expected =
                    products.map(|(key, w)| w * f64::from(v[key][kv_head][i])).sum::<f64>() / sum;
                worst = worst.max((expected - f64::from(*found)).abs());
            }
        }
    }
    Ok(worst)
}

/// Processor time up to now, in seconds: of everybody, and of this process (Linux).
struct Load {
    at: Instant,
    used: Option<(f64, f64)>,
}

impl Load {
    fn now() -> Load {
        Load { at: Instant::now(), used: used() }
    }

    /// Cores that other processes have kept busy since then.
    fn others(&self) -> Option<f64> {
        let ((all, own), (all_now, own_now)) = (self.used?, used()?);
        Some((((all_now - all) - (own_now - own)) / self.at.elapsed().as_secs_f64()).max(0.0))
    }
}

fn used() -> Option<(f64, f64)> {
    let numbers = |text: &str| -> Vec<f64> {
        text.split_whitespace().filter_map(|x| x.parse().ok()).collect()
    };
    let all = std::fs::read_to_string("/proc/stat").ok()?;
    let all = numbers(all.lines().next()?);
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Behind the command's name and the state, which are no numbers.
    let own = numbers(own.rsplit_once(')')?.1);
    let ticks = [0, 1, 2, 5, 6, 7].into_iter().map(|i| all.get(i).copied()).sum::<Option<f64>>()?;
    Some((ticks / 100.0, (own.get(10)? + own.get(11)?) / 100.0))
}

/// Waits until other processes are idle, at most this many seconds.
fn wait_for_quiet(patience: f64) {
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < patience {
        let load = Load::now();
        std::thread::sleep(std::time::Duration::from_millis(700));
        if load.others().is_none_or(|others| others < 0.04) {
            break;
        }
    }
}

fn cpu_model() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

//! Measures the speed of attention on this Mac's GPU: `cargo run --release -p regard --features
//! metal --example metal_bench`. Prints a Markdown table. The program runs plans on buffers of its
//! own. `regard bench --device metal` measures more, and checks the results that it measures.

#[cfg(not(all(feature = "metal", target_vendor = "apple")))]
fn main() {
    eprintln!("this example measures Apple GPUs: run it on a Mac, with --features metal");
    std::process::exit(3);
}

#[cfg(all(feature = "metal", target_vendor = "apple"))]
fn main() -> Result<(), regard::Error> {
    mac::main()
}

#[cfg(all(feature = "metal", target_vendor = "apple"))]
mod mac {
    use regard::metal::BufferView;
    use regard::metal::device::{BufferObject, Gpu, Workspace};
    use regard::{Attention, DType, Device, Error, Inputs, Outputs};

    /// One row of the table: batch, query heads, key/value heads, head dim, query rows, keys;
    /// causal.
    struct Shape {
        name: &'static str,
        batch: usize,
        heads: [usize; 2],
        dim: usize,
        lengths: [usize; 2],
        causal: bool,
    }

    const fn shape(
        name: &'static str,
        batch: usize,
        heads: [usize; 2],
        dim: usize,
        lengths: [usize; 2],
    ) -> Shape {
        Shape { name, batch, heads, dim, lengths, causal: true }
    }

    const SHAPES: [Shape; 10] = [
        shape("p2048", 1, [32, 8], 128, [2048, 2048]),
        shape("p512", 1, [32, 8], 128, [512, 512]),
        shape("p1024d64", 1, [9, 3], 64, [1024, 1024]),
        Shape { causal: false, ..shape("enc512", 1, [12, 12], 64, [512, 512]) },
        shape("p1024d256", 1, [16, 8], 256, [1024, 1024]),
        shape("p512d512", 1, [8, 4], 512, [512, 512]),
        shape("d4k", 1, [32, 8], 128, [1, 4096]),
        shape("d32k", 1, [32, 8], 128, [1, 32768]),
        shape("d2kd64", 1, [9, 3], 64, [1, 2048]),
        shape("v8", 1, [32, 8], 128, [8, 4096]),
    ];

    /// Runs encoded into one command buffer, so that the cost of submitting it does not count.
    const RUNS: usize = 20;
    const ROUNDS: usize = 5;

    pub fn main() -> Result<(), Error> {
        let gpu = Gpu::system_default()?;
        if let Device::Metal(facts) = &gpu.machine().device {
            println!(
                "{}, family {}, {} bytes of threadgroup memory\n",
                gpu.machine().name,
                facts.family,
                facts.threadgroup_bytes
            );
        }
        println!(
            "| shape | type | kernel | microseconds | GFLOP/s | GB/s of keys and values |\n\
             |---|---|---|---|---|---|"
        );
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for shape in &SHAPES {
                measure(&gpu, shape, dtype)?;
            }
        }
        Ok(())
    }

    /// A buffer of numbers between -1 and 1, the same each time.
    fn operand(
        gpu: &Gpu,
        elements: usize,
        dtype: DType,
    ) -> Result<objc2::rc::Retained<BufferObject>, Error> {
        let buffer = gpu.shared_buffer(elements * dtype.size())?;
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        use objc2_metal::MTLBuffer;
        let data = buffer.contents().as_ptr();
        for i in 0..elements {
            let x = next();
            // SAFETY: the buffer holds that many elements of this type, and nothing else uses it
            // yet.
            unsafe {
                match dtype {
                    DType::F16 => data.cast::<regard::f16>().add(i).write(regard::f16::from_f32(x)),
                    DType::BF16 => {
                        data.cast::<regard::bf16>().add(i).write(regard::bf16::from_f32(x))
                    }
                    _ => data.cast::<f32>().add(i).write(x),
                }
            }
        }
        Ok(buffer)
    }

    fn measure(gpu: &Gpu, shape: &Shape, dtype: DType) -> Result<(), Error> {
        let Shape { batch, heads: [heads, kv_heads], dim, lengths: [rows, keys], causal, .. } =
            *shape;
        let (q_shape, k_shape) = ([batch, rows, heads, dim], [batch, keys, kv_heads, dim]);
        let (q_len, k_len) = (q_shape.iter().product::<usize>(), k_shape.iter().product::<usize>());
        let [q, out] = [operand(gpu, q_len, dtype)?, operand(gpu, q_len, dtype)?];
        let [k, v] = [operand(gpu, k_len, dtype)?, operand(gpu, k_len, dtype)?];
        let view = |buffer, shape: &[usize]| BufferView::new(buffer).tensor(0, dtype, shape, None);
        let attention = Attention { causal, ..Attention::default() };
        let inputs =
            Inputs::new(view(&q, &q_shape)?, view(&k, &k_shape)?, view(&v, &k_shape)?, attention);
        let written = BufferView::new(&out).tensor_mut(0, dtype, &q_shape, None)?;
        let mut outputs = Outputs { out: written, lse: None };
        let plan = gpu.plan(&inputs, &outputs)?;
        gpu.load(&plan)?;
        let mut workspace = Workspace::for_plan(&plan, gpu)?;
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let took = gpu.submit(|encoder| {
                for _ in 0..RUNS {
                    // SAFETY: the work has ended when `submit` returns; until then nothing else
                    // touches the buffers.
                    unsafe { gpu.run(&plan, encoder, &inputs, &mut outputs, &mut workspace)? };
                }
                Ok(())
            })?;
            best = best.min(took.as_secs_f64() / RUNS as f64);
        }
        // Keys that rows see, all rows together.
        let pairs: usize =
            (0..rows).map(|row| if causal { keys - rows + row + 1 } else { keys }).sum();
        let flops = (4 * batch * heads * dim * pairs) as f64;
        let bytes = (2 * k_len * dtype.size()) as f64;
        println!(
            "| {} | {dtype} | {} | {:.1} | {:.0} | {:.1} |",
            shape.name,
            plan.choice().kernel.name(),
            best * 1e6,
            flops / best / 1e9,
            bytes / best / 1e9
        );
        Ok(())
    }
}

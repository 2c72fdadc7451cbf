//! The custom op.

use crate::options::{Attention, Execution, Threads, with_inputs};
use crate::prepare::Prepared;
use crate::view::{Cpu, refuse, wrap};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};
use regard::{DType, Float, Inputs, Machine, Memory, Outputs, Plan, Problem, TensorMut};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// Attention of `q` over `k` and `v`, in a new contiguous tensor of the shape of `q` with `v`'s
/// head dim.
///
/// `q` is `[B, Lq, Hq, Dk]`, or `[total, Hq, Dk]` with `cu_seqlens_q`; `k` and `v` are
/// `[B, Lk, Hkv, D]`, `[total, Hkv, D]` with `cu_seqlens_k`, or pools
/// `[blocks, block_size, Hkv, D]` with `block_table`. Each is f32, f16 or bf16, and of any strides;
/// keys and values can be f8e4m3 too, and `u8` bytes of a [`CacheFormat`](crate::CacheFormat), by
/// [`Execution::format`]. [`Execution::attention`] is the same with a plan, a type of the result or
/// threads of the caller's choice.
///
/// A tensor whose innermost stride is not 1, such as transposed keys, is copied first, as
/// [`Tensor::contiguous`] does; pools are not, and have to have that stride. Also converted into a
/// copy are lengths, positions and tables of i64, masks of u32, i64 and f64, and slopes and sinks
/// of other types than f32. Everything else is read in place.
///
/// # Errors
/// If an operand breaks the contract or is on another device; the message names it, its value and
/// what is allowed.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, attention: &Attention) -> Result<Tensor> {
    Execution::default().attention(q, k, v, attention)
}

/// [`attention()`], and the natural logarithm of each row's softmax denominator: `f32`, of the
/// shape of the result without its last dimension; minus infinity for a row that sees nothing.
///
/// # Errors
/// As [`attention()`].
pub fn attention_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attention: &Attention,
) -> Result<(Tensor, Tensor)> {
    Execution::default().attention_with_lse(q, k, v, attention)
}

impl Execution {
    /// As the function [`attention()`].
    ///
    /// # Errors
    /// As there, or if the operands exceed the plan.
    pub fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        attention: &Attention,
    ) -> Result<Tensor> {
        let Prepared { q, k, v, attention } = Prepared::new(q, k, v, attention)?;
        q.apply_op3(&k, &v, Fused { attention, execution: self.clone(), lse: None })
    }

    /// As the function [`attention_with_lse`].
    ///
    /// # Errors
    /// As there, or if the operands exceed the plan. [`Execution::plan`] plans for one result, so
    /// that its plan is an error here.
    pub fn attention_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        attention: &Attention,
    ) -> Result<(Tensor, Tensor)> {
        let lse = Arc::new(Mutex::new(None));
        let Prepared { q, k, v, attention } = Prepared::new(q, k, v, attention)?;
        let (execution, place) = (self.clone(), Some(lse.clone()));
        let op = Fused { attention, execution, lse: place };
        let out = q.apply_op3(&k, &v, op)?;
        let rows = &out.dims()[..out.rank() - 1];
        let lse = lse.lock().expect("no pass has panicked").take();
        let lse = lse.expect("the forward pass has run");
        let lse = Tensor::from_storage(lse, rows, BackpropOp::none(), false);
        Ok((out, lse))
    }

    /// Plans these operands, for the field [`plan`](Execution#structfield.plan): one plan serves
    /// all layers of a step, and smaller batches and shorter lengths too. [`Plan::explain`] says
    /// what will run and why.
    ///
    /// # Errors
    /// As [`attention()`].
    pub fn plan(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        attention: &Attention,
    ) -> Result<Arc<Plan>> {
        let prepared = Prepared::new(q, k, v, attention)?;
        let attention = &prepared.attention;
        let held = [&prepared.q, &prepared.k, &prepared.v].map(Tensor::storage_and_layout);
        match held.each_ref().map(|(storage, layout)| (&**storage, *layout)) {
            [
                (Storage::Cpu(q), q_layout),
                (Storage::Cpu(k), k_layout),
                (Storage::Cpu(v), v_layout),
            ] => {
                let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
                let place = Cpu { format: self.format };
                with_inputs(attention, &place, operands, |inputs| {
                    new_plan(&self.problem(inputs)?, &self.threads.machine()?)
                })
            }
            #[cfg(feature = "cuda")]
            [
                (Storage::Cuda(q), q_layout),
                (Storage::Cuda(k), k_layout),
                (Storage::Cuda(v), v_layout),
            ] => crate::cuda::plan(self, attention, [(q, q_layout), (k, k_layout), (v, v_layout)]),
            #[cfg(feature = "metal")]
            [
                (Storage::Metal(q), q_layout),
                (Storage::Metal(k), k_layout),
                (Storage::Metal(v), v_layout),
            ] => crate::metal::plan(self, attention, [(q, q_layout), (k, k_layout), (v, v_layout)]),
            _ => Err(refuse(
                "q, k or v",
                "on a device that is not supported here",
                "all three on the CPU",
            )),
        }
    }

    /// The problem of operands, without the log-sum-exp.
    pub(crate) fn problem<M: Memory>(&self, inputs: &Inputs<M>) -> Result<Problem> {
        let dtype = self.out_dtype(inputs.q.dtype())?;
        let mut problem = Problem::from_inputs(inputs, dtype, false).map_err(wrap)?;
        self.bound(&mut problem);
        Ok(problem)
    }

    /// Bounds ragged lengths that the host has not read.
    fn bound(&self, problem: &mut Problem) {
        if let (regard::QueryStorage::Ragged { .. }, Some(len)) =
            (problem.queries, self.max_query_len)
        {
            problem.query_len = problem.query_len.min(len);
        }
        if let (regard::KvStorage::Ragged, Some(len)) = (problem.keys, self.max_kv_len) {
            problem.kv_len = problem.kv_len.min(len);
        }
    }

    /// The plan that was made beforehand, or another one.
    fn plan_or(&self, other: impl FnOnce() -> Result<Arc<Plan>>) -> Result<Arc<Plan>> {
        self.plan.as_ref().map_or_else(other, |plan| Ok(Arc::clone(plan)))
    }
}

pub(crate) struct Fused {
    pub(crate) attention: Attention,
    pub(crate) execution: Execution,
    /// Receives the log-sum-exp, if requested: a custom op returns one tensor only.
    pub(crate) lse: Option<Arc<Mutex<Option<Storage>>>>,
}

impl CustomOp3 for Fused {
    fn name(&self) -> &'static str {
        "regard-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let place = Cpu { format: self.execution.format };
        with_inputs(&self.attention, &place, operands, |inputs| {
            let shape = result_shape(inputs);
            let storage = match self.execution.out_dtype(inputs.q.dtype())? {
                DType::F16 => CpuStorage::F16(self.run::<f16>(inputs, &shape)?),
                DType::BF16 => CpuStorage::BF16(self.run::<bf16>(inputs, &shape)?),
                // Queries of a type that has no attention are refused in there, by name.
                _ => CpuStorage::F32(self.run::<f32>(inputs, &shape)?),
            };
            Ok((storage, Shape::from(shape)))
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        q: &candle_core::MetalStorage,
        q_layout: &Layout,
        k: &candle_core::MetalStorage,
        k_layout: &Layout,
        v: &candle_core::MetalStorage,
        v_layout: &Layout,
    ) -> Result<(candle_core::MetalStorage, Shape)> {
        crate::metal::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)])
    }
}

/// The shape of the result: that of the queries with the values' head dim.
fn result_shape<M: Memory>(inputs: &Inputs<M>) -> Vec<usize> {
    let mut shape = inputs.q.shape().to_vec();
    if let (Some(last), Some(&value_dim)) = (shape.last_mut(), inputs.v.shape().last()) {
        *last = value_dim.saturating_mul(inputs.v.dtype().values());
    }
    shape
}

/// A call on a GPU: its plan, and the type and shape of its result.
#[cfg(any(feature = "cuda", feature = "metal"))]
pub(crate) struct GpuCall {
    pub(crate) plan: Arc<Plan>,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Whether kernels may leave elements of the result as they are: rows that no sequence has.
    /// They are zeros, as on the CPU.
    pub(crate) zeroed: bool,
}

pub(crate) fn new_plan(problem: &Problem, machine: &Machine) -> Result<Arc<Plan>> {
    Plan::new(problem, machine).map(Arc::new).map_err(wrap)
}

impl Fused {
    /// `plan` is asked for a plan if the caller of the op has none.
    #[cfg(any(feature = "cuda", feature = "metal"))]
    pub(crate) fn gpu_call<M: Memory>(
        &self,
        inputs: &Inputs<M>,
        plan: impl FnOnce(&Problem) -> Result<Arc<Plan>>,
    ) -> Result<GpuCall> {
        let dtype = self.execution.out_dtype(inputs.q.dtype())?;
        // Checked before anything is allocated: a view with stride 0 can claim any shape.
        let mut problem = Problem::from_inputs(inputs, dtype, self.lse.is_some()).map_err(wrap)?;
        self.execution.bound(&mut problem);
        let plan = self.execution.plan_or(|| plan(&problem))?;
        let zeroed = inputs.attention.cu_seqlens_q.is_some() && !self.execution.covers_all_rows;
        Ok(GpuCall { plan, dtype, shape: result_shape(inputs), zeroed })
    }

    fn run<T: Float>(&self, inputs: &Inputs, shape: &[usize]) -> Result<Vec<T>> {
        // Checked before anything is allocated: a view with stride 0 can claim any shape.
        let problem = Problem::from_inputs(inputs, T::DTYPE, self.lse.is_some()).map_err(wrap)?;
        let mut out = zeros::<T>("out", shape)?;
        let rows = &shape[..shape.len().saturating_sub(1)];
        let mut lse = self.lse.as_ref().map(|_| zeros::<f32>("lse", rows)).transpose()?;
        let mut outputs = Outputs {
            out: TensorMut::from_slice(&mut out, shape, None).map_err(wrap)?,
            lse: match &mut lse {
                Some(lse) => Some(TensorMut::from_slice(lse, rows, None).map_err(wrap)?),
                None => None,
            },
        };
        let plan =
            self.execution.plan_or(|| new_plan(&problem, &self.execution.threads.machine()?))?;
        with_workspace(plan.workspace_bytes(), |workspace| {
            let executor: &dyn regard::cpu::Executor = match self.execution.threads {
                Threads::Rayon => &RayonPool,
                Threads::Barrier => &BarrierPool,
            };
            regard::cpu::run(&plan, inputs, &mut outputs, workspace, executor).map_err(wrap)
        })?;
        if let (Some(place), Some(lse)) = (&self.lse, lse) {
            *place.lock().expect("no pass has panicked") = Some(Storage::Cpu(CpuStorage::F32(lse)));
        }
        Ok(out)
    }
}

/// A sound shape can still be larger than memory.
pub(crate) fn zeros<T: Float>(argument: &str, shape: &[usize]) -> Result<Vec<T>> {
    let len = shape.iter().try_fold(1usize, |len, &n| len.checked_mul(n)).unwrap_or(usize::MAX);
    let mut data = Vec::new();
    if data.try_reserve_exact(len).is_err() {
        return Err(refuse(argument, format!("of shape {shape:?}"), "what fits in memory"));
    }
    data.resize(len, T::ZERO);
    Ok(data)
}

/// Calls `work` with that many bytes, kept for the thread's next call.
fn with_workspace<R>(bytes: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static WORKSPACE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    let mut workspace = WORKSPACE.take();
    if workspace.len() < bytes {
        workspace.resize(bytes, 0);
    }
    let result = work(&mut workspace[..bytes]);
    WORKSPACE.set(workspace);
    result
}

/// Rayon's pool. The calling thread, which is mostly none of it, works too: it need not wait for
/// another to wake up.
pub(crate) struct RayonPool;

impl regard::cpu::Executor for RayonPool {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        rayon::in_place_scope(|scope| {
            (1..copies).for_each(|_| scope.spawn(|_| work()));
            work();
        });
    }
}

/// Candle's barrier pool.
struct BarrierPool;

impl regard::cpu::Executor for BarrierPool {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        candle_core::utils::barrier_pool()
            .execute_chunked(copies, |calls| calls.for_each(|_| work()));
    }
}

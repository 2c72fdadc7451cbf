//! Cases on NVIDIA GPUs: operands go there, a plan runs, results come back. And the laws that hold
//! on a GPU ([`laws`]).

pub mod laws;
mod mirror;

use crate::random;
use mirror::Mirror;
pub use mirror::MirrorMut;
use regard::cuda::cudarc::driver::sys::CUevent_flags;
use regard::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use regard::cuda::{COUNTER_BYTES, DeviceMemory, Gpu, RawWorkspace, driver_error};
use regard::{Device, Error, Inputs, Machine, Outputs, Plan, Problem, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Runs problems whose operands are in the host's memory on a GPU, one after the other.
///
/// Each operand is surrounded by NaN (all bits set) there, and has the host's strides and alignment
/// modulo 16 bytes. The workspace is exactly as large as planned and full of garbage except for its
/// counters. These are checked after every run. Writing beside an output is an error.
pub struct Runner {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    /// The plan of the last run.
    plan: Option<Plan>,
    garbage: u8,
    /// Runs that read one schedule; `None` for one run without.
    layers: Option<usize>,
}

/// The default contents of workspaces: NaN.
const GARBAGE: u8 = 0xff;

impl Runner {
    /// On the GPU of that number.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    pub fn new(ordinal: usize) -> Result<Runner, Error> {
        let gpu = Gpu::new(ordinal)?;
        // SAFETY: everything is queued on one stream, so nothing needs to be waited for. Waiting
        // for earlier events is not allowed while a graph is captured.
        unsafe { gpu.context().disable_event_tracking() };
        let stream =
            gpu.context().new_stream().map_err(|error| driver_error("making a stream", error))?;
        Ok(Runner { gpu, stream, plan: None, garbage: GARBAGE, layers: None })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The stream that everything is queued on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The plan of the last run.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// From now on, workspaces hold this byte but for their counters.
    pub fn set_garbage(&mut self, garbage: u8) {
        self.garbage = garbage;
    }

    /// From now on, a run is a schedule and that many runs that read it, as the layers of a step
    /// do; `None` for one run without a schedule.
    pub fn set_layers(&mut self, layers: Option<usize>) {
        self.layers = layers;
    }

    /// Runs a problem: for [`Case::run`](crate::Case::run).
    ///
    /// # Errors
    /// As [`Gpu::run`], or if the run wrote outside of its memory.
    pub fn run(&mut self, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        self.run_planned(inputs, outputs, 1, |gpu, inputs, outputs| gpu.plan(inputs, outputs))
            .map(|_| ())
    }

    /// Runs a problem some times; the seconds of the fastest run are returned.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn run_timed(
        &mut self,
        inputs: &Inputs,
        outputs: &mut Outputs,
        repetitions: usize,
    ) -> Result<f64, Error> {
        self.run_planned(inputs, outputs, repetitions, |gpu, inputs, outputs| {
            gpu.plan(inputs, outputs)
        })
    }

    /// Runs a problem with a plan of the caller's making.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn run_planned<P>(
        &mut self,
        inputs: &Inputs,
        outputs: &mut Outputs,
        repetitions: usize,
        plan: P,
    ) -> Result<f64, Error>
    where
        P: FnOnce(&Gpu, &Inputs<DeviceMemory>, &Outputs<DeviceMemory>) -> Result<Plan, Error>,
    {
        let stream = &self.stream;
        let uploaded = Uploaded::new(inputs, stream)?;
        let device_inputs = uploaded.inputs();
        // With the contents of the host's outputs: gaps between elements come back unchanged.
        let out = MirrorMut::filled(&mut outputs.out, stream)?;
        let lse = outputs.lse.as_mut().map(|lse| MirrorMut::filled(lse, stream)).transpose()?;
        let mut device_outputs =
            Outputs { out: out.view(), lse: lse.as_ref().map(|lse| lse.view()) };
        let plan = plan(&self.gpu, &device_inputs, &device_outputs)?;
        let workspace = Workspace::filled(plan.workspace_bytes(), self.garbage, stream)?;
        self.gpu.load(&plan)?;
        let mut fastest = f64::INFINITY;
        for _ in 0..repetitions.max(1) {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            let event = || {
                stream
                    .record_event(flags)
                    .map_err(|error| driver_error("recording an event", error))
            };
            let begin = event()?;
            let (raw, address) = (stream.cu_stream(), workspace.raw());
            // SAFETY: the stream is of this GPU, and everything lives until it has been waited for
            // below. Between the schedule and its runs nothing else is queued.
            unsafe {
                if self.layers.is_some() {
                    self.gpu.schedule(&plan, raw, &device_inputs, &device_outputs, address)?;
                }
                for _ in 0..self.layers.unwrap_or(0) {
                    self.gpu.run_scheduled(
                        &plan,
                        raw,
                        &device_inputs,
                        &mut device_outputs,
                        address,
                    )?;
                }
                if self.layers.is_none() {
                    self.gpu.run_raw(&plan, raw, &device_inputs, &mut device_outputs, address)?;
                }
            }
            let end = event()?;
            let elapsed = begin
                .elapsed_ms(&end)
                .map_err(|error| driver_error("running the kernel", error))?;
            fastest = fastest.min(f64::from(elapsed) / 1e3);
        }
        workspace.check(stream)?;
        out.download(&mut outputs.out, stream)?;
        if let (Some(lse), Some(to)) = (lse, &mut outputs.lse) {
            lse.download(to, stream)?;
        }
        self.plan = Some(plan);
        Ok(fastest)
    }
}

impl random::Device for Runner {
    fn way(&self, _way: usize) -> String {
        // The kernels of the run that failed, if there was one.
        self.plan.as_ref().map_or_else(|| self.gpu.machine().to_string(), kernels)
    }

    fn run(
        &mut self,
        how: random::How,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<(), Error> {
        // Checked here: contents can be read here.
        Problem::from_operands(inputs, outputs)?;
        self.set_garbage(how.garbage);
        let planned = |gpu: &Gpu, inputs: &Inputs<_>, outputs: &Outputs<_>| {
            let here = gpu.machine().clone();
            // Fewer multiprocessors: more work for each. An even number, for clusters of two CTAs.
            // A smaller L2 cache: copies in parts.
            let machine = match how.plan % 5 {
                0 | 1 => here,
                2 => with_multiprocessors(here, 2),
                3 => with_multiprocessors(here, 4),
                _ => with_l2_bytes(here, 16 << 10),
            };
            Plan::new(&Problem::from_operands(inputs, outputs)?, &machine)
        };
        self.run_planned(inputs, outputs, 1, planned).map(|_| ())
    }

    fn reads_cache(&self, spec: &crate::Spec) -> bool {
        spec.has_plan_on(self.gpu.machine())
    }
}

/// The machine, if its GPU had that many multiprocessors.
pub(crate) fn with_multiprocessors(mut machine: Machine, multiprocessors: usize) -> Machine {
    if let Device::Cuda(facts) = &mut machine.device {
        facts.multiprocessors = multiprocessors;
    }
    machine
}

/// The machine, if its GPU had an L2 cache of that many bytes.
pub(crate) fn with_l2_bytes(mut machine: Machine, l2_bytes: usize) -> Machine {
    if let Device::Cuda(facts) = &mut machine.device {
        facts.l2_bytes = l2_bytes;
    }
    machine
}

/// The modules that a plan launches.
fn kernels(plan: &Plan) -> String {
    let launches = plan
        .cuda()
        .map(|launches| launches.in_order().map(|launch| launch.module).collect::<Vec<_>>());
    launches.unwrap_or_default().join(" + ")
}

/// A workspace full of garbage but for its counters, and more of it behind.
pub struct Workspace {
    memory: CudaSlice<u8>,
    bytes: usize,
    garbage: u8,
}

impl Workspace {
    const GUARD: usize = 4096;

    /// Makes one of that size.
    ///
    /// # Errors
    /// If the GPU has too little memory.
    pub fn new(bytes: usize, stream: &Arc<CudaStream>) -> Result<Workspace, Error> {
        Workspace::filled(bytes, GARBAGE, stream)
    }

    /// The same with garbage of the caller's choice.
    ///
    /// # Errors
    /// As [`Workspace::new`].
    pub fn filled(bytes: usize, garbage: u8, stream: &Arc<CudaStream>) -> Result<Workspace, Error> {
        let doing = || format!("making a workspace of {bytes} bytes");
        let mut memory = mirror::filled(bytes + Workspace::GUARD, garbage, stream)?;
        let counters = COUNTER_BYTES.min(bytes);
        if counters > 0 {
            stream
                .memset_zeros(&mut memory.slice_mut(..counters))
                .map_err(|error| driver_error(doing(), error))?;
        }
        Ok(Workspace { memory, bytes, garbage })
    }

    /// As [`Gpu::run_raw`] takes it.
    pub fn raw(&self) -> RawWorkspace {
        let (address, _) = self.memory.device_ptr(self.memory.stream());
        RawWorkspace { address, bytes: self.bytes }
    }

    /// Waits, and copies a part.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn bytes(&self, range: Range<usize>, stream: &Arc<CudaStream>) -> Result<Vec<u8>, Error> {
        mirror::downloaded(&self.memory.slice(range), stream)
    }

    /// Waits, and looks whether the counters are zero again and nothing was written behind the
    /// workspace.
    ///
    /// # Errors
    /// If not.
    pub fn check(&self, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let counters = COUNTER_BYTES.min(self.bytes);
        let read = |range| mirror::downloaded(&self.memory.slice(range), stream);
        if let Some(i) = read(0..counters)?.iter().position(|&byte| byte != 0) {
            let found = format!("not zero after the run, in byte {i}");
            return Err(Error::argument("counters of the workspace", found, "zero"));
        }
        if let Some(i) = read(self.bytes..self.bytes + Workspace::GUARD)?
            .iter()
            .position(|&byte| byte != self.garbage)
        {
            let found = format!("written {i} bytes behind its end");
            return Err(Error::argument(
                "workspace",
                found,
                format!("{} bytes, as planned", self.bytes),
            ));
        }
        Ok(())
    }
}

/// Every input of a problem, on the GPU.
pub struct Uploaded<'a> {
    host: Inputs<'a>,
    mirrors: HashMap<&'static str, Mirror>,
}

impl<'a> Uploaded<'a> {
    /// Queues the copies of all operands.
    ///
    /// # Errors
    /// If the GPU's memory does not suffice.
    pub fn new(host: &Inputs<'a>, stream: &Arc<CudaStream>) -> Result<Uploaded<'a>, Error> {
        let upload = |(name, tensor)| Ok((name, Mirror::new(tensor, stream)?));
        let mirrors: Result<_, Error> = host.named().map(upload).collect();
        Ok(Uploaded { host: *host, mirrors: mirrors? })
    }

    /// The same inputs, as views of the GPU's memory.
    pub fn inputs(&self) -> Inputs<'_, DeviceMemory> {
        self.host.map(|name, _| self.mirrors[name].view())
    }

    /// Queues a copy of other contents into the operand of that name: lengths, tables, offsets that
    /// change between replays of a graph.
    ///
    /// # Errors
    /// If it is not there, or of another shape.
    pub fn replace(
        &mut self,
        name: &str,
        with: &Tensor,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let Some(mirror) = self.mirrors.get_mut(name) else {
            return Err(Error::argument(name, "not given", "an operand that was uploaded"));
        };
        mirror.replace(with, stream)
    }
}

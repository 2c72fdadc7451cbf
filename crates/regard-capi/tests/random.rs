//! Random problems through the C interface: the shared library, loaded as C would, operands,
//! outputs and workspace between guard pages.

#![cfg(unix)]

mod libraries;
// The structs of the ABI, as the library has them.
#[path = "../src/types.rs"]
#[allow(dead_code, reason = "the test uses a part of the interface")]
mod types;

use libloading::Library;
use regard::{
    DType, Error, Inputs, KeyOffset, KeyPositions, Outputs, QueryOffset, Refusal, Values,
};
use regard_cases::random::{self, Device, Guarded, How, Profile, Side, crash};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use types::{Operands, REGARD_MAX_RANK, Tensor};

const PROBLEMS: u64 = 300;

type PlanFor = unsafe extern "C" fn(*const Operands, *const types::Device, *mut *mut c_void) -> i32;
type Run =
    unsafe extern "C" fn(*const c_void, *const Operands, *mut c_void, usize, *mut c_void) -> i32;

/// The library's functions.
struct Interface {
    plan_for: PlanFor,
    workspace_bytes: unsafe extern "C" fn(*const c_void) -> usize,
    run: Run,
    destroy: unsafe extern "C" fn(*mut c_void),
    last_error: unsafe extern "C" fn() -> *const c_char,
    // Keeps the functions valid.
    _library: Library,
}

impl Interface {
    fn load() -> Interface {
        // SAFETY: the library has no initializers, and its functions have these types in the
        // header.
        unsafe {
            let library = Library::new(&libraries::libraries().shared).expect("the library loads");
            Interface {
                plan_for: *library.get(b"regard_plan_for\0").expect("declared"),
                workspace_bytes: *library.get(b"regard_plan_workspace_bytes\0").expect("declared"),
                run: *library.get(b"regard_plan_run\0").expect("declared"),
                destroy: *library.get(b"regard_plan_destroy\0").expect("declared"),
                last_error: *library.get(b"regard_last_error\0").expect("declared"),
                _library: library,
            }
        }
    }

    /// A status of the library as an error.
    fn checked(&self, status: i32) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the text is valid until the next call on this thread fails.
        let words = unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy().into_owned();
        Err(match status {
            2 => Refusal { machine: "the C interface".into(), reason: words }.into(),
            _ => Error::argument(
                "the C interface",
                format!("of status {status}: {words}"),
                "status 0",
            ),
        })
    }
}

/// A tensor of C.
fn tensor(data: *mut u8, dims: &regard::Dims) -> Tensor {
    let dtype = match dims.dtype() {
        DType::F32 => types::DType::F32,
        DType::F16 => types::DType::F16,
        DType::BF16 => types::DType::Bf16,
        DType::I32 => types::DType::I32,
        DType::Bool => types::DType::Bool,
        DType::E4M3 => types::DType::E4m3,
        DType::E5M2 => types::DType::E5m2,
        DType::I8 => types::DType::I8,
        DType::Q8_0 => types::DType::Q8_0,
        DType::Q4_0 => types::DType::Q4_0,
        other => unreachable!("no random problem has elements of type {other}"),
    };
    let (mut shape, mut strides) = ([0; REGARD_MAX_RANK], [0; REGARD_MAX_RANK]);
    for (i, (&n, &stride)) in dims.shape().iter().zip(dims.strides()).enumerate() {
        (shape[i], strides[i]) = (n as i64, stride);
    }
    Tensor {
        data: data.cast(),
        dtype: dtype as i32,
        rank: dims.rank() as u32,
        shape,
        strides,
        options: types::REGARD_STRIDED,
        reserved: 0,
    }
}

/// The option bits of an attention.
fn options(attention: &regard::Attention<regard::Tensor>) -> u32 {
    let has_offset = matches!(attention.q_offset, QueryOffset::Same(_));
    let options = [
        (attention.causal, types::REGARD_CAUSAL),
        (attention.window.left.is_some(), types::REGARD_WINDOW_LEFT),
        (attention.window.right.is_some(), types::REGARD_WINDOW_RIGHT),
        (attention.chunk.is_some(), types::REGARD_CHUNK),
        (attention.values == Values::KeyPrefix, types::REGARD_VALUES_KEY_PREFIX),
        (attention.softcap.is_some(), types::REGARD_SOFTCAP),
        (attention.indices_are_slots, types::REGARD_INDICES_ARE_SLOTS),
        (attention.key_positions.is_some(), types::REGARD_KEY_POSITIONS),
        (attention.batch_invariant, types::REGARD_BATCH_INVARIANT),
        (attention.scale.is_some(), types::REGARD_SCALE),
        (has_offset, types::REGARD_Q_OFFSET),
    ];
    options.into_iter().filter(|(given, _)| *given).fold(0, |all, (_, option)| all | option)
}

impl Device for Interface {
    fn way(&self, _way: usize) -> String {
        "the C interface".into()
    }

    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        let attention = &inputs.attention;
        let given = |input: &regard::Tensor| tensor(input.as_ptr().cast_mut(), input);
        let tensors = attention.map(|_, input| given(&input));
        let pointer = |tensor: Option<&Tensor>| tensor.map_or(ptr::null(), ptr::from_ref);
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|input| given(&input));
        let out = tensor(outputs.out.as_mut_ptr(), &outputs.out);
        let lse = outputs.lse.as_mut().map(|lse| tensor(lse.as_mut_ptr(), lse));
        let side =
            |side: Option<usize>| side.map_or(0, |side| i64::try_from(side).unwrap_or(i64::MAX));
        let is_latent = attention.values == Values::KeyPrefix;
        // Then `v` may be left out.
        let v_given = !is_latent || how.plan.is_multiple_of(2);
        let operands = Operands {
            size: size_of::<Operands>(),
            q: &q,
            k: &k,
            v: if v_given { &v } else { ptr::null() },
            out: &out,
            lse: pointer(lse.as_ref()),
            mask: pointer(tensors.mask.as_ref()),
            alibi_slopes: pointer(tensors.alibi_slopes.as_ref()),
            sinks: pointer(tensors.sinks.as_ref()),
            tree_mask: pointer(tensors.tree_mask.as_ref()),
            kv_lens: pointer(tensors.kv_lens.as_ref()),
            q_offsets: pointer(tensors.q_offset.tensor()),
            cu_seqlens_q: pointer(tensors.cu_seqlens_q.as_ref()),
            cu_seqlens_k: pointer(tensors.cu_seqlens_k.as_ref()),
            block_table: pointer(tensors.block_table.as_ref()),
            options: options(attention),
            scale: attention.scale.unwrap_or(0.0),
            softcap: attention.softcap.unwrap_or(0.0),
            chunk: attention.chunk.map_or(0, |chunk| u32::try_from(chunk).unwrap_or(u32::MAX)),
            window_left: side(attention.window.left),
            window_right: side(attention.window.right),
            q_offset: match attention.q_offset {
                QueryOffset::Same(offset) => offset,
                _ => 0,
            },
            k_scales: pointer(tensors.k_scales.as_ref()),
            v_scales: pointer(tensors.v_scales.as_ref()),
            key_indices: pointer(tensors.key_indices.as_ref()),
            key_counts: pointer(tensors.key_counts.as_ref()),
            key_offsets: pointer(tensors.key_positions.as_ref().and_then(KeyPositions::tensor)),
            key_offset: match attention.key_positions {
                Some(KeyPositions { offset: KeyOffset::Same(offset), .. }) => offset,
                _ => 0,
            },
            key_stride: attention.key_positions.map_or(0, |positions| positions.stride as i64),
            prefix_groups: pointer(tensors.prefix_groups.as_ref()),
            prefix_lens: pointer(tensors.prefix_lens.as_ref()),
        };
        let device = types::Device {
            size: size_of::<types::Device>(),
            kind: 0,
            ordinal: 0,
            context: ptr::null_mut(),
            machine: ptr::null(),
            threads: [1, 1, 2, 3][how.plan as usize % 4],
            reserved: 0,
            executor: None,
            executor_data: ptr::null_mut(),
        };
        let mut plan = ptr::null_mut();
        // SAFETY: all that is pointed to lives until the end; the plan is destroyed once.
        unsafe {
            self.checked((self.plan_for)(&operands, &device, &mut plan))?;
            let bytes = (self.workspace_bytes)(plan);
            let mut workspace = Guarded::new(bytes, Side::End, how.garbage);
            let status =
                (self.run)(plan, &operands, workspace.as_mut_ptr().cast(), bytes, ptr::null_mut());
            let result = self.checked(status);
            (self.destroy)(plan);
            result
        }
    }

    fn guards(&self) -> bool {
        true
    }
}

#[test]
fn random_problems_through_the_c_interface() {
    crash::watch();
    let make = || -> Result<Box<dyn Device>, Error> { Ok(Box::new(Interface::load())) };
    let summary = random::test("through the C interface", PROBLEMS, Profile::All, &make);
    let summary = summary.unwrap_or_else(|failures| panic!("{failures}"));
    assert_eq!(summary.passed, PROBLEMS, "{:?}", summary.refused);
}

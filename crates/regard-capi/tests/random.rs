//! Random problems through the C interface: the shared library, loaded as C would, operands,
//! outputs and workspace between guard pages.

#![cfg(unix)]

mod libraries;
mod operands;
// The structs of the ABI, as the library has them.
#[path = "../src/types.rs"]
#[allow(dead_code, reason = "the test uses a part of the interface")]
mod types;

use libloading::Library;
use operands::{Results, tensor, with_operands};
use regard::{Error, Inputs, Outputs, Refusal, Values};
use regard_cases::random::{self, Device, Guarded, How, Profile, Side, crash};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use types::Operands;

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

impl Device for Interface {
    fn way(&self, _way: usize) -> String {
        "the C interface".into()
    }

    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        let is_latent = inputs.attention.values == Values::KeyPrefix;
        // Then `v` may be left out.
        let has_v = !is_latent || how.plan.is_multiple_of(2);
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
        let out = tensor(outputs.out.as_mut_ptr(), &outputs.out);
        let lse = outputs.lse.as_mut().map(|lse| tensor(lse.as_mut_ptr(), lse));
        let results = Results { out, lse };
        let given = |input: &regard::Tensor| tensor(input.as_ptr().cast_mut(), input);
        with_operands(inputs, &results, has_v, given, |operands| {
            let mut plan = ptr::null_mut();
            // SAFETY: all that is pointed to lives until the end; the plan is destroyed once.
            unsafe {
                self.checked((self.plan_for)(operands, &device, &mut plan))?;
                let bytes = (self.workspace_bytes)(plan);
                let mut workspace = Guarded::new(bytes, Side::End, how.garbage);
                let memory = workspace.as_mut_ptr().cast();
                let status = (self.run)(plan, operands, memory, bytes, ptr::null_mut());
                let result = self.checked(status);
                (self.destroy)(plan);
                result
            }
        })
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

//! Kernels that are embedded in a program, launched as clang's host code launches them.

mod common;

use deltawave_sim::hip::functions::*;
use hip_sys::{hipError_t, types::*};
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

const SUCCESS: hipError_t = hipError_t::hipSuccess;

#[repr(C)]
struct Wrapper(u32, u32, *const c_void, *const c_void);

/// Stands for a kernel or a variable on the host's side: its address is the name.
static SAXPY: u8 = 0;
static TABLE: u8 = 0;
static MISSING: u8 = 0;

fn host(symbol: &'static u8) -> *const c_void {
    (&raw const *symbol).cast()
}

const ONE: dim3 = dim3 { x: 1, y: 1, z: 1 };
const WAVE: dim3 = dim3 { x: 64, y: 1, z: 1 };

/// `saxpy<<<1, 64>>>(y, x, a, n)`, as clang's stub for the host does it.
///
/// # Safety
/// `y` and `x` are device arrays of 64 elements.
unsafe fn saxpy(mut y: *mut c_void, mut x: *mut c_void, mut a: f32, mut n: i32) -> hipError_t {
    let (mut grid, mut block) = (dim3::default(), dim3::default());
    let (mut bytes, mut stream) = (1, hipStream_t::NULL);
    let mut arguments: [*mut c_void; 4] = [
        (&raw mut y).cast(),
        (&raw mut x).cast(),
        (&raw mut a).cast(),
        (&raw mut n).cast(),
    ];
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        let pushed = __hipPushCallConfiguration(ONE, WAVE, 0, stream);
        assert_eq!(pushed, SUCCESS);
        let popped = __hipPopCallConfiguration(&mut grid, &mut block, &mut bytes, &mut stream);
        assert_eq!((popped, grid, block, bytes), (SUCCESS, ONE, WAVE, 0));
        let arguments = arguments.as_mut_ptr();
        hipLaunchKernel(host(&SAXPY), grid, block, arguments, bytes, stream)
    }
}

#[test]
fn embedded_kernels_and_variables() {
    let Some(code) = common::compile("launch.hip", &[]) else {
        return;
    };
    let bundle = common::bundle(&code);
    let image = bundle.as_ptr().cast();
    let none = null_mut::<c_char>();
    // SAFETY: all pointers are valid for the calls, and the bundle outlives its registration.
    unsafe {
        let wrong = Wrapper(0x1234, 1, image, null());
        assert!(__hipRegisterFatBinary((&raw const wrong).cast()).is_null());
        let wrapper = Wrapper(0x4849_5046, 1, image, null());
        let binary = __hipRegisterFatBinary((&raw const wrapper).cast());
        assert!(!binary.is_null());
        for (symbol, name) in [(&SAXPY, c"saxpy"), (&MISSING, c"no_such_kernel")] {
            let (n, w) = (null_mut(), null_mut());
            let (symbol, name) = (host(symbol), name.as_ptr());
            __hipRegisterFunction(binary, symbol, none, name, !0, n, n, n, n, w);
        }
        __hipRegisterVar(binary, host(&TABLE), none, c"table".as_ptr(), 0, 16, 0, 0);

        let (mut x, mut y) = (null_mut(), null_mut());
        assert_eq!(hipMalloc(&mut x, 256), SUCCESS);
        assert_eq!(hipMalloc(&mut y, 256), SUCCESS);
        assert_eq!(hipMemsetD32(x, 2.0f32.to_bits() as i32, 64), SUCCESS);
        assert_eq!(hipMemsetD32(y, 1.0f32.to_bits() as i32, 64), SUCCESS);
        assert_eq!(saxpy(y, x, 3.0, 64), SUCCESS);
        let mut found = [0f32; 64];
        let kind = hipMemcpyKind::hipMemcpyDeviceToHost;
        let copied = hipMemcpy(found.as_mut_ptr().cast(), y, 256, kind);
        assert_eq!((copied, found), (SUCCESS, [7.0; 64]));

        let mut attributes = hipFuncAttributes::default();
        assert_eq!(hipFuncGetAttributes(&mut attributes, host(&SAXPY)), SUCCESS);
        assert_eq!(attributes.maxThreadsPerBlock, 1024);
        assert_eq!(
            hipFuncGetAttributes(&mut attributes, host(&MISSING)),
            hipError_t::hipErrorInvalidDeviceFunction
        );
        let (mut blocks, mut block) = (0, 0);
        let by_size = hipOccupancyMaxActiveBlocksPerMultiprocessor;
        assert_eq!(by_size(&mut blocks, host(&SAXPY), 256, 0), SUCCESS);
        assert_eq!(blocks, 8);
        let potential = hipOccupancyMaxPotentialBlockSize;
        let status = potential(&mut blocks, &mut block, host(&SAXPY), 0, 0);
        assert_eq!((status, blocks, block), (SUCCESS, 2 * 304, 1024));

        let mut size = 0;
        assert_eq!(hipGetSymbolSize(&mut size, host(&TABLE)), SUCCESS);
        assert_eq!(size, 16);
        let mut word = 77i32;
        let to = hipMemcpyKind::hipMemcpyHostToDevice;
        let at = (&raw mut word).cast::<c_void>();
        assert_eq!(hipMemcpyToSymbol(host(&TABLE), at, 4, 8, to), SUCCESS);
        let mut table = [0i32; 4];
        let read = |table: &mut [i32; 4]| {
            hipMemcpyFromSymbol(table.as_mut_ptr().cast(), host(&TABLE), 16, 0, kind)
        };
        assert_eq!(read(&mut table), SUCCESS);
        assert_eq!(table, [10, 20, 77, 40]);
        assert_eq!(
            hipMemcpyToSymbol(host(&TABLE), at, 4, 13, to),
            hipError_t::hipErrorInvalidValue
        );

        // A reset unloads; what is used next is loaded again, as it was at first.
        assert_eq!(hipDeviceReset(), SUCCESS);
        assert_eq!(read(&mut table), SUCCESS);
        assert_eq!(table, [10, 20, 30, 40]);

        let mut old: hipDeviceProp_tR0000 = std::mem::zeroed();
        assert_eq!(hipGetDeviceProperties(&mut old, 0), SUCCESS);
        assert_eq!((old.multiProcessorCount, old.warpSize), (304, 64));
        assert_eq!((old.isLargeBar, old.gcnArchName[0]), (1, b'g' as c_char));

        __hipUnregisterFatBinary(binary);
        assert_eq!(
            hipFuncGetAttributes(&mut attributes, host(&SAXPY)),
            hipError_t::hipErrorInvalidDeviceFunction
        );
        let (mut grid, mut stream) = (ONE, hipStream_t::NULL);
        assert_eq!(
            __hipPopCallConfiguration(&mut grid, &mut grid.clone(), &mut size, &mut stream),
            hipError_t::hipErrorMissingConfiguration
        );
    }
}

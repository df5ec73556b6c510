//! Drop-in `libamdhip64.so`: exports the HIP runtime's functions on the simulated gfx942.
//!
//! A program that loads it instead of AMD's runtime runs its kernels on the simulator. To select it, set
//! `LD_LIBRARY_PATH`, `LD_PRELOAD`, or `DELTAWAVE_HIP_LIBRARY` for programs that use `hip_sys`.
#![allow(non_snake_case)]
// As HIP documents them.
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use deltawave_sim::hip::functions::{self, dim3, hipDeviceProp_tR0000, hipFuncAttributes};
use deltawave_sim::hip::hip_sys::{hipDeviceProp_tR0600, hipError_t, types::*};

macro_rules! export {
    (;
        status { $($(#[$a:meta])* fn $status:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$b:meta])* fn $other:ident($($other_arg:ident: $other_type:ty),*) -> $result:ty;)* }
    ) => {
        $(export_one! { $(#[$a])* fn $status($($arg: $type),*) -> hipError_t })*
        $(export_one! { $(#[$b])* fn $other($($other_arg: $other_type),*) -> $result })*
    };
}

macro_rules! export_extra {
    (; $(fn $extra:ident($($arg:ident: $type:ty),*);)*) => {
        $(export_one! {
            /// Behaves as in HIP.
            fn $extra($($arg: $type),*) -> hipError_t
        })*
    };
}

macro_rules! export_registration {
    (; $(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(export_one! {
            /// Behaves as in HIP, or as clang's host code for HIP expects.
            fn $name($($arg: $type),*) -> $result
        })*
    };
}

macro_rules! export_one {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        $(#[$meta])*
        // SAFETY: the name is that of a function of the HIP runtime, which this library stands for.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller keeps the function's contract, which is passed on.
            unsafe { functions::$name($($arg),*) }
        }
    };
}

deltawave_sim::hip::hip_sys::for_each_function!(export);
deltawave_sim::for_each_extra!(export_extra);
deltawave_sim::for_each_registration!(export_registration);

//! Vector extensions of the host, chosen at run time.

/// A set of host instructions that the 64-lane functions are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The instructions that every host of this architecture has.
    Baseline,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, CD.
    Avx512,
}

impl Level {
    /// Finds the best level of this host. `DELTAWAVE_SIM_LEVEL` (`baseline`, `avx2` or `avx512`) lowers it.
    pub fn detect() -> Level {
        let best = Self::best();
        match std::env::var("DELTAWAVE_SIM_LEVEL").as_deref() {
            Ok("baseline") => Level::Baseline,
            Ok("avx2") => best.min(Level::Avx2),
            _ => best,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn best() -> Level {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("lzcnt");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512cd");
        if avx512 {
            Level::Avx512
        } else if avx2 {
            Level::Avx2
        } else {
            Level::Baseline
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn best() -> Level {
        Level::Baseline
    }
}

/// Compiles a function for each level. `leveled!(fn NAME = BODY);` defines `fn NAME(Level) -> Exec`, which returns
/// `BODY` compiled for that level. `BODY` is an `#[inline(always)] unsafe fn(&mut Wave, &Inst, &mut Env) -> Flow`.
/// Functions that `BODY` calls must be `#[inline(always)]` too, or they are compiled for the baseline.
macro_rules! leveled {
    ($(#[$meta:meta])* fn $name:ident = $body:path) => {
        $(#[$meta])*
        pub(crate) fn $name(level: $crate::exec::Level) -> $crate::exec::Exec {
            use $crate::{exec::{Env, Flow, Level}, inst::Inst, wave::Wave};
            unsafe fn baseline(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
            unsafe fn avx2(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(
                enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512cd"
            )]
            unsafe fn avx512(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => avx512,
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => avx2,
                _ => baseline,
            }
        }
    };
}
pub(crate) use leveled;

/// Works like [`leveled`], for instructions too rare to be compiled for AVX-512: that level runs the AVX2 code.
macro_rules! leveled_narrow {
    ($(#[$meta:meta])* fn $name:ident = $body:path) => {
        $(#[$meta])*
        pub(crate) fn $name(level: $crate::exec::Level) -> $crate::exec::Exec {
            use $crate::{exec::{Env, Flow, Level}, inst::Inst, wave::Wave};
            unsafe fn baseline(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
            unsafe fn avx2(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Avx2 => avx2,
                _ => baseline,
            }
        }
    };
}
pub(crate) use leveled_narrow;

/// Works like [`leveled`], for rare instructions: every level runs the baseline code.
macro_rules! unleveled {
    ($(#[$meta:meta])* fn $name:ident = $body:path) => {
        $(#[$meta])*
        pub(crate) fn $name(_: $crate::exec::Level) -> $crate::exec::Exec {
            use $crate::{exec::{Env, Flow}, inst::Inst, wave::Wave};
            unsafe fn baseline(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body(w, i, e) }
            }
            baseline
        }
    };
}
pub(crate) use unleveled;

//! Checks of C arguments: pointers that may be null, structs of another version, numbers out of range.

use std::ffi::c_void;
use std::fmt::Display;
use std::mem::{MaybeUninit, offset_of};
use std::slice;

use deltawave::batch::PerSequence;
use deltawave::error::{ArgumentError, ArgumentKind};
use deltawave::tensor::{
    Element, Tensor, TensorMut, TokenScalars, TokenScalarsMut, Tokens, TokensMut,
};
use deltawave::types::{Dtype, StateLayout};

use crate::abi::{self, dw_lengths, dw_tensor};
use crate::status::refuse;

pub(crate) type Checked<T> = Result<T, ArgumentError>;

/// Struct that begins with its size in the caller's header. All zeros are a valid value.
///
/// # Safety
/// The first field is `size: usize`; every bit pattern is a value.
pub(crate) unsafe trait Versioned: Copy {
    /// Size in the first version of the ABI, the smallest that a caller can have.
    const FIRST: usize = size_of::<Self>();
}
// SAFETY: plain integers, floats and pointers, `size` first, as the header has them.
unsafe impl Versioned for abi::dw_device_info {}
// SAFETY: as above.
unsafe impl Versioned for dw_tensor {}
// SAFETY: as above.
unsafe impl Versioned for dw_lengths {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_prefill_spec {
    const FIRST: usize = offset_of!(Self, segments);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_prefill_tensors {
    const FIRST: usize = offset_of!(Self, context);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_prefill_backward_tensors {
    const FIRST: usize = offset_of!(Self, context);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_rank_layout {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_parallel_prefill_sizes {
    const FIRST: usize = offset_of!(Self, block);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_parallel_prefill_backward_sizes {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_gate_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_norm_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_gate_backward_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_norm_backward_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_conv_backward_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_conv_spec {
    const FIRST: usize = offset_of!(Self, qk_l2norm);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_conv_tensors {
    const FIRST: usize = offset_of!(Self, a);
}

// SAFETY: as above.
unsafe impl Versioned for abi::dw_decode_spec {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_decode_tensors {
    const FIRST: usize = offset_of!(Self, draft_slots);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_commit_tensors {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_layer_spec {}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_layer_tensors {
    const FIRST: usize = offset_of!(Self, o);
}
// SAFETY: as above.
unsafe impl Versioned for abi::dw_layer_backward_tensors {}

fn null(argument: &str) -> ArgumentError {
    let allowed = "it must be given";
    refuse(argument, ArgumentKind::Pointer, "a null pointer", allowed)
}

/// Refuses a null pointer. Does not read its target.
pub(crate) fn given<T>(argument: &str, pointer: *const T) -> Checked<*const T> {
    if pointer.is_null() {
        return Err(null(argument));
    }
    Ok(pointer)
}

/// Refuses a pointer that is null or not aligned: a reference to an unaligned value is undefined behaviour.
fn aligned<T>(argument: &str, pointer: *const T) -> Checked<*const T> {
    given(argument, pointer)?;
    if !pointer.is_aligned() {
        let allowed = format!("it must be aligned to {} bytes", align_of::<T>());
        let was = format!("address {pointer:p}");
        return Err(refuse(argument, ArgumentKind::Pointer, was, allowed));
    }
    Ok(pointer)
}

/// Reference to the target of a pointer.
///
/// # Safety
/// The pointer is null, not aligned, or points to a `T` that nobody writes while the reference lives.
pub(crate) unsafe fn reference<'a, T>(argument: &str, pointer: *const T) -> Checked<&'a T> {
    aligned(argument, pointer)?;
    // SAFETY: not null and aligned; the caller promises the rest.
    Ok(unsafe { &*pointer })
}

/// Reference to an output.
///
/// # Safety
/// The pointer is null, not aligned, or valid for writes.
pub(crate) unsafe fn output<'a, T>(argument: &str, pointer: *mut T) -> Checked<&'a mut T> {
    aligned(argument, pointer)?;
    // SAFETY: not null and aligned; the caller promises the rest.
    Ok(unsafe { &mut *pointer })
}

/// Reads and checks the size that the caller gives a struct.
///
/// # Safety
/// As [`structure`].
pub(crate) unsafe fn size_of_caller<T: Versioned>(
    argument: &str,
    pointer: *const T,
) -> Checked<usize> {
    aligned(argument, pointer)?;
    // SAFETY: the size is the first field.
    let size = unsafe { pointer.cast::<usize>().read() };
    // Later versions have larger structs, but none as large as this limit. A size that is no multiple of the alignment
    // would cut a pointer in two.
    const MOST: usize = 1 << 16;
    let (least, step) = (T::FIRST, align_of::<T>());
    if !size.is_multiple_of(step) || !(least..=MOST).contains(&size) {
        let name = format!("{argument}.size");
        let allowed =
            format!("it must be sizeof the struct, a multiple of {step} from {least} to {MOST}");
        return Err(refuse(&name, ArgumentKind::Size, size, allowed));
    }
    Ok(size)
}

/// Copies a struct of the caller. Fields that only this version has become 0. Fields that only the caller has must be 0.
///
/// # Safety
/// The pointer is null, or points to `size` bytes, where `size` is the struct's first field.
pub(crate) unsafe fn structure<T: Versioned>(argument: &str, pointer: *const T) -> Checked<T> {
    // SAFETY: the caller passes a null or valid pointer.
    let size = unsafe { size_of_caller(argument, pointer) }?;
    // SAFETY: as above.
    let bytes = unsafe { slice::from_raw_parts(pointer.cast::<u8>(), size) };
    let known = size.min(size_of::<T>());
    if bytes[known..].iter().any(|b| *b != 0) {
        let was = "a field is set that this version of the library does not know";
        let allowed = format!("its version is {}", env!("CARGO_PKG_VERSION"));
        return Err(refuse(argument, ArgumentKind::Value, was, allowed));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both hold `known` bytes, and any bytes are a `T`.
    unsafe {
        value
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(bytes.as_ptr(), known);
        Ok(value.assume_init())
    }
}

/// Array of numbers on the device; absent if the pointer is null.
///
/// # Safety
/// As [`PerSequence::from_raw`].
pub(crate) unsafe fn numbers<T: Element>(
    address: *const T,
    count: usize,
) -> Option<PerSequence<'static, T>> {
    // SAFETY: the caller keeps the promise under `# Safety`.
    (!address.is_null()).then(|| unsafe { PerSequence::from_raw(address, count) })
}

/// A slot that means no slot, if the caller names one.
pub(crate) fn null_slot(has: i32, slot: i32) -> Checked<Option<i32>> {
    Ok(flag("has_null_slot", has)?.then_some(slot))
}

/// Refuses a negative number. Formats the argument's name only for an error, because a launch must not allocate.
pub(crate) fn natural<T>(argument: impl Display, value: T) -> Checked<usize>
where
    T: Copy + Display,
    usize: TryFrom<T>,
{
    usize::try_from(value).map_err(|_| {
        let allowed = "it must not be negative";
        refuse(argument, ArgumentKind::Value, value, allowed)
    })
}

/// Flag: 0 or 1.
pub(crate) fn flag(argument: &str, value: i32) -> Checked<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(refuse(
            argument,
            ArgumentKind::Value,
            value,
            "it must be 0 or 1",
        )),
    }
}

/// Constant of the header, as the value beside it in `all`.
pub(crate) fn choice<T: Copy>(
    argument: impl Display,
    value: i32,
    all: &[(u32, &str, T)],
) -> Checked<T> {
    let found = all
        .iter()
        .find(|(code, ..)| i64::from(*code) == i64::from(value));
    found.map(|(.., choice)| *choice).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(_, name, _)| *name).collect();
        let allowed = format!("it must be {}", names.join(" or "));
        refuse(argument, ArgumentKind::Value, value, allowed)
    })
}

pub(crate) fn dtype(argument: impl Display, value: i32) -> Checked<Dtype> {
    let all = [
        (abi::DW_F32, "DW_F32", Dtype::F32),
        (abi::DW_BF16, "DW_BF16", Dtype::Bf16),
        (abi::DW_F16, "DW_F16", Dtype::F16),
    ];
    choice(argument, value, &all)
}

pub(crate) fn layout(argument: &str, value: i32) -> Checked<StateLayout> {
    let key = StateLayout::KeyMajor;
    let value_major = StateLayout::ValueMajor;
    let all = [
        (abi::DW_STATE_KEY_MAJOR, "DW_STATE_KEY_MAJOR", key),
        (
            abi::DW_STATE_VALUE_MAJOR,
            "DW_STATE_VALUE_MAJOR",
            value_major,
        ),
    ];
    choice(argument, value, &all)
}

/// Tensor argument: its name for messages, and the caller's pointer.
#[derive(Clone, Copy)]
pub(crate) struct Argument {
    name: &'static str,
    pointer: *const dw_tensor,
}

const TOKENS: &str = "it must be [T, H, D], or [B, T, H, D] of a dense batch";
const CONV_STATES: &str = "it must be [slots, channels, columns] or [slots, columns, channels]";
const SCALARS: &str = "it must be [T, HV], or [B, T, HV] of a dense batch";

impl Argument {
    /// # Safety
    /// The pointer is null, or points to a struct of the size that it states. The tensor's memory meets the conditions of
    /// [`Tensor::from_raw`] or [`TensorMut::from_raw`] until the work that uses it is done.
    pub unsafe fn new(name: &'static str, pointer: *const dw_tensor) -> Self {
        Argument { name, pointer }
    }

    /// Absent if the pointer is null.
    pub fn optional(self) -> Option<Self> {
        (!self.pointer.is_null()).then_some(self)
    }

    fn view(self) -> Checked<View> {
        let name = self.name;
        // SAFETY: the caller of `Argument::new` passed a null or valid pointer.
        let t = unsafe { structure(name, self.pointer) }?;
        let rank = usize::try_from(t.rank).unwrap_or(0);
        if !(1..=t.shape.len()).contains(&rank) {
            let allowed = "it must be from 1 to 4";
            let name = format!("{name}.rank");
            return Err(refuse(&name, ArgumentKind::Shape, t.rank, allowed));
        }
        let mut view = View {
            name,
            data: t.data,
            dtype: dtype(format_args!("{name}.dtype"), t.dtype)?,
            rank,
            shape: [0; 4],
            strides: [0; 4],
        };
        for i in 0..rank {
            view.shape[i] = natural(format_args!("{name}.shape[{i}]"), t.shape[i])?;
            // The stride of a dimension of length 0 or 1 is never used, so it may hold anything.
            view.strides[i] = match view.shape[i] {
                0 | 1 => 1,
                _ => natural(format_args!("{name}.strides[{i}]"), t.strides[i])?,
            };
        }
        Ok(view)
    }

    /// `[T, H, D]` or `[B, T, H, D]`.
    pub fn tokens(self) -> Checked<Tokens<'static>> {
        let view = self.view()?;
        match view.rank {
            3 => Ok(view.tensor::<3>().into()),
            4 => Ok(view.tensor::<4>().into()),
            _ => Err(view.wrong_rank(TOKENS)),
        }
    }

    /// [`Argument::tokens`] of an output.
    pub fn tokens_mut(self) -> Checked<TokensMut<'static>> {
        let view = self.view()?;
        match view.rank {
            3 => Ok(view.tensor_mut::<3>().into()),
            4 => Ok(view.tensor_mut::<4>().into()),
            _ => Err(view.wrong_rank(TOKENS)),
        }
    }

    /// `[T, HV]` or `[B, T, HV]`.
    pub fn scalars(self) -> Checked<TokenScalars<'static>> {
        let view = self.view()?;
        match view.rank {
            2 => Ok(view.tensor::<2>().into()),
            3 => Ok(view.tensor::<3>().into()),
            _ => Err(view.wrong_rank(SCALARS)),
        }
    }

    /// [`Argument::scalars`] of an output.
    pub fn scalars_mut(self) -> Checked<TokenScalarsMut<'static>> {
        let view = self.view()?;
        match view.rank {
            2 => Ok(view.tensor_mut::<2>().into()),
            3 => Ok(view.tensor_mut::<3>().into()),
            _ => Err(view.wrong_rank(SCALARS)),
        }
    }

    /// `[T, HV]`, or `[T, blocks, heads of a block]`: inputs of gates.
    pub fn scalars_in_blocks(self) -> Checked<TokenScalars<'static>> {
        let view = self.view()?;
        match view.rank {
            2 => Ok(view.tensor::<2>().into()),
            3 => Ok(TokenScalars::in_blocks(view.tensor())),
            _ => Err(view.wrong_rank("it must be [T, HV] or [T, blocks, heads of a block]")),
        }
    }

    /// [`Argument::scalars_in_blocks`] of an output.
    pub fn scalars_in_blocks_mut(self) -> Checked<TokenScalarsMut<'static>> {
        let view = self.view()?;
        match view.rank {
            2 => Ok(view.tensor_mut::<2>().into()),
            3 => Ok(TokenScalarsMut::in_blocks(view.tensor_mut())),
            _ => Err(view.wrong_rank("it must be [T, HV] or [T, blocks, heads of a block]")),
        }
    }

    /// `[HV]`.
    pub fn per_head(self) -> Checked<Tensor<'static, 1>> {
        let view = self.view()?;
        match view.rank {
            1 => Ok(view.tensor()),
            _ => Err(view.wrong_rank("it must be [HV]")),
        }
    }

    /// [`Argument::per_head`] of an output.
    pub fn per_head_mut(self) -> Checked<TensorMut<'static, 1>> {
        Ok(self.of_rank(1, "it must be [HV]")?.tensor_mut())
    }

    fn of_rank(self, rank: usize, allowed: &str) -> Checked<View> {
        let view = self.view()?;
        match view.rank == rank {
            true => Ok(view),
            false => Err(view.wrong_rank(allowed)),
        }
    }

    /// `[channels]`, `[V]`.
    pub fn vector(self) -> Checked<Tensor<'static, 1>> {
        Ok(self.of_rank(1, "it must have one dimension")?.tensor())
    }

    /// [`Argument::vector`] of an output.
    pub fn vector_mut(self) -> Checked<TensorMut<'static, 1>> {
        Ok(self.of_rank(1, "it must have one dimension")?.tensor_mut())
    }

    /// [`Argument::matrix`] of an output.
    pub fn matrix_mut(self) -> Checked<TensorMut<'static, 2>> {
        Ok(self.of_rank(2, "it must have two dimensions")?.tensor_mut())
    }

    /// `[T, columns]`, `[channels, width]`.
    pub fn matrix(self) -> Checked<Tensor<'static, 2>> {
        Ok(self.of_rank(2, "it must have two dimensions")?.tensor())
    }

    /// `[T, blocks, channels of a block]`.
    pub fn blocks(self) -> Checked<Tensor<'static, 3>> {
        let allowed = "it must have three dimensions: [T, blocks, channels of a block]";
        Ok(self.of_rank(3, allowed)?.tensor())
    }

    /// [`Argument::blocks`] of an output.
    pub fn blocks_mut(self) -> Checked<TensorMut<'static, 3>> {
        let allowed = "it must have three dimensions: [T, blocks, channels of a block]";
        Ok(self.of_rank(3, allowed)?.tensor_mut())
    }

    /// Pool of conv states, an output.
    pub fn states_mut(self) -> Checked<TensorMut<'static, 3>> {
        Ok(self.of_rank(3, CONV_STATES)?.tensor_mut())
    }

    /// Conv states that are read.
    pub fn conv_states(self) -> Checked<Tensor<'static, 3>> {
        Ok(self.of_rank(3, CONV_STATES)?.tensor())
    }

    fn state_view(self) -> Checked<View> {
        let view = self.view()?;
        match view.rank {
            4 => Ok(view),
            _ => Err(view.wrong_rank("it must be [N, HV, K, V] or [N, HV, V, K]")),
        }
    }

    /// States.
    pub fn state(self) -> Checked<Tensor<'static, 4>> {
        Ok(self.state_view()?.tensor())
    }

    /// States after each of `tokens` tokens of every sequence.
    pub fn states_of_tokens(self, tokens: usize) -> Checked<Tensor<'static, 5>> {
        let view = self.state_view()?;
        let (shape, strides) = view.of_tokens(tokens)?;
        // SAFETY: the caller of `Argument::new` passed a tensor in valid memory.
        Ok(unsafe { Tensor::from_raw(view.data, view.dtype, shape, strides) })
    }

    /// [`Argument::states_of_tokens`] of an output.
    pub fn states_of_tokens_mut(self, tokens: usize) -> Checked<TensorMut<'static, 5>> {
        let view = self.state_view()?;
        let (shape, strides) = view.of_tokens(tokens)?;
        // SAFETY: as above.
        Ok(unsafe { TensorMut::from_raw(view.data, view.dtype, shape, strides) })
    }

    /// [`Argument::state`] of an output.
    pub fn state_mut(self) -> Checked<TensorMut<'static, 4>> {
        Ok(self.state_view()?.tensor_mut())
    }
}

/// Checked tensor struct.
struct View {
    name: &'static str,
    data: *mut c_void,
    dtype: Dtype,
    rank: usize,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl View {
    fn wrong_rank(&self, allowed: &str) -> ArgumentError {
        let was = format!("shape {:?}", &self.shape[..self.rank]);
        refuse(self.name, ArgumentKind::Shape, was, allowed)
    }

    /// Shape and strides of rows `[B T, ...]` viewed as `[B, T, ...]`.
    fn of_tokens(&self, tokens: usize) -> Checked<([usize; 5], [usize; 5])> {
        let [rows, heads, a, b] = self.shape;
        let [row, of_head, of_a, of_b] = self.strides;
        if rows % tokens != 0 {
            let allowed = format!("it must have {tokens} states for each sequence");
            return Err(self.wrong_rank(&allowed));
        }
        let sequence = row.saturating_mul(tokens);
        Ok((
            [rows / tokens, tokens, heads, a, b],
            [sequence, row, of_head, of_a, of_b],
        ))
    }

    fn tensor<const R: usize>(&self) -> Tensor<'static, R> {
        // SAFETY: the caller of `Argument::new` passed a tensor in valid memory.
        unsafe {
            Tensor::from_raw(
                self.data,
                self.dtype,
                std::array::from_fn(|i| self.shape[i]),
                std::array::from_fn(|i| self.strides[i]),
            )
        }
    }

    fn tensor_mut<const R: usize>(&self) -> TensorMut<'static, R> {
        // SAFETY: as above.
        unsafe {
            TensorMut::from_raw(
                self.data,
                self.dtype,
                std::array::from_fn(|i| self.shape[i]),
                std::array::from_fn(|i| self.strides[i]),
            )
        }
    }
}

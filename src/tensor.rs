//! Device memory, and views of it with shapes and strides.
//!
//! A [`Buffer`] owns memory. A [`Tensor`] or [`TensorMut`] borrows a buffer or refers to the caller's memory
//! ([`Tensor::from_raw`]). Strides count elements. The last stride must be 1; each operation documents which other
//! strides it allows. A dimension of length 0 or 1 may have any stride.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

use half::{bf16, f16};
use hip_sys::hipMemcpyKind;

use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::runtime::{Context, Stream};
use crate::types::Dtype;

mod sealed {
    pub trait Sealed {}
}

/// A type that device memory may hold: every bit pattern is a valid value.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {}
/// A floating-point element type of tensors.
pub trait Float: Element {
    /// The type's name.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty),*) => { $(impl sealed::Sealed for $type {} impl Element for $type {})* };
}
elements!(f32, bf16, f16, u8, u32, i32, i64);
impl Float for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Float for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Float for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

/// An owned allocation of device memory.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    context: Context,
    address: *mut T,
    len: usize,
}

// SAFETY: the pointer is a device address; the host never dereferences it.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl Context {
    /// Allocates `len` elements with undefined values.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.make_current()?;
        let mut address: *mut c_void = ptr::null_mut();
        if len > 0 {
            let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| {
                ArgumentError::new(
                    "len",
                    ArgumentKind::Size,
                    format!("{len} elements"),
                    "at most isize::MAX bytes",
                )
            })?;
            // SAFETY: `address` is valid for a write.
            unsafe { self.hip().hipMalloc(&mut address, bytes)? };
        }
        Ok(Buffer {
            context: self.clone(),
            address: address.cast(),
            len,
        })
    }

    /// A buffer with these values.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }
}

impl<T: Element> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Address on the device.
    pub fn address(&self) -> *mut c_void {
        self.address.cast()
    }

    /// Overwrites all elements and waits until that is done. It does not wait for queued work that reads the buffer:
    /// synchronise that work's stream first.
    ///
    /// # Errors
    /// A number of values other than the buffer's length; a failed copy.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.len {
            let was = format!("{} elements", values.len());
            return Err(ArgumentError::new(
                "values",
                ArgumentKind::Size,
                was,
                format!("exactly {}", self.len),
            )
            .into());
        }
        if self.len > 0 {
            self.context.make_current()?;
            let kind = hipMemcpyKind::hipMemcpyHostToDevice;
            // SAFETY: both sides hold `values.len()` elements.
            unsafe {
                self.context.hip().hipMemcpy(
                    self.address.cast(),
                    values.as_ptr().cast(),
                    size_of_val(values),
                    kind,
                )?
            };
        }
        Ok(())
    }

    /// Fills all bytes, in stream order.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn fill_bytes(&mut self, byte: u8, stream: &Stream) -> Result<()> {
        crate::runtime::same_context("stream", stream.context(), &self.context)?;
        if self.len > 0 {
            let handle = hip_sys::hipStream_t(stream.handle());
            // SAFETY: the buffer has that many bytes.
            unsafe {
                self.context.hip().hipMemsetAsync(
                    self.address.cast(),
                    i32::from(byte),
                    self.len * size_of::<T>(),
                    handle,
                )?
            };
        }
        Ok(())
    }

    /// Waits for all work of `stream` and copies the values to the host. It does not wait for other streams.
    ///
    /// # Errors
    /// Work that failed; a failed copy.
    pub fn download(&self, stream: &Stream) -> Result<Vec<T>> {
        crate::runtime::same_context("stream", stream.context(), &self.context)?;
        let mut values = vec![T::default(); self.len];
        stream.synchronize()?;
        if self.len > 0 {
            self.context.make_current()?;
            let kind = hipMemcpyKind::hipMemcpyDeviceToHost;
            let bytes = self.len * size_of::<T>();
            // SAFETY: both sides hold `len` elements, and every bit pattern is an element.
            unsafe {
                self.context.hip().hipMemcpy(
                    values.as_mut_ptr().cast(),
                    self.address.cast(),
                    bytes,
                    kind,
                )?
            };
        }
        Ok(values)
    }

    pub(crate) fn owner(&self) -> Owner {
        Some(self.context.clone())
    }
}

impl<T: Float> Buffer<T> {
    /// View of the first elements as a dense tensor.
    ///
    /// # Errors
    /// The shape has more elements than the buffer.
    pub fn tensor<const R: usize>(&self, shape: [usize; R]) -> Result<Tensor<'_, R>> {
        self.tensor_strided(shape, dense_strides(shape), 0)
    }

    /// View with given strides that starts `offset` elements into the buffer.
    ///
    /// # Errors
    /// The view reaches past the buffer's end.
    pub fn tensor_strided<const R: usize>(
        &self,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Result<Tensor<'_, R>> {
        let extent = extent(shape, strides).and_then(|e| e.checked_add(offset));
        if extent.is_none_or(|e| e > self.len) {
            let was = format!("shape {shape:?}, strides {strides:?}, offset {offset}");
            let allowed = format!("a view within the buffer's {} elements", self.len);
            return Err(ArgumentError::new("tensor", ArgumentKind::Size, was, allowed).into());
        }
        let address = self.address.wrapping_add(offset).cast();
        Ok(Tensor {
            address,
            dtype: T::DTYPE,
            shape,
            strides: meaningful_strides(shape, strides),
            owner: self.owner(),
            borrow: PhantomData,
        })
    }

    /// Mutable [`Buffer::tensor`].
    ///
    /// # Errors
    /// As [`Buffer::tensor`].
    pub fn tensor_mut<const R: usize>(&mut self, shape: [usize; R]) -> Result<TensorMut<'_, R>> {
        self.tensor_strided_mut(shape, dense_strides(shape), 0)
    }

    /// Mutable [`Buffer::tensor_strided`].
    ///
    /// # Errors
    /// As [`Buffer::tensor_strided`].
    pub fn tensor_strided_mut<const R: usize>(
        &mut self,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Result<TensorMut<'_, R>> {
        let Tensor {
            address,
            dtype,
            strides,
            owner,
            ..
        } = self.tensor_strided(shape, strides, offset)?;
        Ok(TensorMut(Tensor {
            address,
            dtype,
            shape,
            strides,
            owner,
            borrow: PhantomData,
        }))
    }
}

impl Buffer<u8> {
    /// View of bytes as elements of `dtype`, `offset` elements into the buffer, for types known only at run time.
    ///
    /// # Errors
    /// The view reaches past the buffer's end.
    pub fn tensor_of<const R: usize>(
        &self,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Result<Tensor<'_, R>> {
        let size = dtype.size();
        let extent = extent(shape, strides).and_then(|e| e.checked_add(offset)?.checked_mul(size));
        if extent.is_none_or(|e| e > self.len) {
            let was = format!("shape {shape:?}, strides {strides:?}, offset {offset} of {dtype}");
            let allowed = format!("a view within the buffer's {} bytes", self.len);
            return Err(ArgumentError::new("tensor", ArgumentKind::Size, was, allowed).into());
        }
        let address = self.address.wrapping_add(offset * size).cast();
        Ok(Tensor {
            address,
            dtype,
            shape,
            strides: meaningful_strides(shape, strides),
            owner: self.owner(),
            borrow: PhantomData,
        })
    }

    /// Mutable [`Buffer::tensor_of`].
    ///
    /// # Errors
    /// As [`Buffer::tensor_of`].
    pub fn tensor_of_mut<const R: usize>(
        &mut self,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
        offset: usize,
    ) -> Result<TensorMut<'_, R>> {
        let Tensor {
            address,
            strides,
            owner,
            ..
        } = self.tensor_of(dtype, shape, strides, offset)?;
        Ok(TensorMut(Tensor {
            address,
            dtype,
            shape,
            strides,
            owner,
            borrow: PhantomData,
        }))
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if !self.address.is_null() {
            // SAFETY: it was allocated here and is freed once; the runtime waits for the device first.
            let _ = unsafe { self.context.hip().hipFree(self.address.cast()) };
        }
    }
}

/// Context that memory belongs to, if it is known.
pub(crate) type Owner = Option<Context>;

/// A read-only view of device memory.
#[derive(Clone, Debug)]
pub struct Tensor<'a, const R: usize> {
    pub(crate) address: *mut c_void,
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; R],
    pub(crate) strides: [usize; R],
    pub(crate) owner: Owner,
    borrow: PhantomData<&'a ()>,
}

/// A mutable view of device memory.
#[derive(Debug)]
pub struct TensorMut<'a, const R: usize>(pub(crate) Tensor<'a, R>);

impl<const R: usize> Tensor<'_, R> {
    /// A view of the caller's own memory.
    ///
    /// # Safety
    /// While work that reads the view is under way, every element of it lies in memory of the context's device.
    pub unsafe fn from_raw(
        address: *const c_void,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
    ) -> Self {
        Tensor {
            address: address.cast_mut(),
            dtype,
            shape,
            strides: meaningful_strides(shape, strides),
            owner: None,
            borrow: PhantomData,
        }
    }

    /// The shape.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// Strides in elements. A dimension of length 0 or 1 has the stride of a dense tensor, even if another was given.
    pub fn strides(&self) -> [usize; R] {
        self.strides
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
}

impl<'a, const R: usize> Tensor<'a, R> {
    /// View of this tensor's elements with another shape, from element `offset` on. The caller ensures that it stays
    /// within.
    pub(crate) fn part<const S: usize>(
        &self,
        shape: [usize; S],
        strides: [usize; S],
        offset: usize,
    ) -> Tensor<'a, S> {
        Tensor {
            address: self.address.wrapping_byte_add(offset * self.dtype.size()),
            dtype: self.dtype,
            shape,
            strides,
            owner: self.owner.clone(),
            borrow: PhantomData,
        }
    }
}

impl<'a> Tensor<'a, 4> {
    /// A range of rows of a tensor over the tokens of a packed batch. Its shape and strides were checked.
    pub(crate) fn token_rows(&self, rows: Range<usize>) -> Self {
        let [_, _, heads, dim] = self.shape;
        let shape = [1, rows.len(), heads, dim];
        self.part(shape, self.strides, rows.start * self.strides[1])
    }
}

impl<const R: usize> TensorMut<'_, R> {
    /// Mutable view of the caller's memory.
    ///
    /// # Safety
    /// As [`Tensor::from_raw`]; and nothing else accesses the memory while work that writes it is under way.
    pub unsafe fn from_raw(
        address: *mut c_void,
        dtype: Dtype,
        shape: [usize; R],
        strides: [usize; R],
    ) -> Self {
        // SAFETY: as promised by the caller.
        TensorMut(unsafe { Tensor::from_raw(address, dtype, shape, strides) })
    }
}

/// The strides of a dense tensor.
pub fn dense_strides<const R: usize>(shape: [usize; R]) -> [usize; R] {
    let mut strides = [1usize; R];
    for i in (0..R.saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1].max(1));
    }
    strides
}

/// Replaces strides of dimensions of length 0 or 1 by those of a dense tensor. NumPy and torch may put any number
/// there, and no check may refuse it.
fn meaningful_strides<const R: usize>(shape: [usize; R], strides: [usize; R]) -> [usize; R] {
    let dense = dense_strides(shape);
    std::array::from_fn(|i| match shape[i] {
        0 | 1 => dense[i],
        _ => strides[i],
    })
}

/// Elements from the first to past the last of a view; `None` on overflow.
fn extent<const R: usize>(shape: [usize; R], strides: [usize; R]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let mut last = 0usize;
    for i in 0..R {
        last = last.checked_add((shape[i] - 1).checked_mul(strides[i])?)?;
    }
    last.checked_add(1)
}

/// Tokens of a batch: the first dimensions of a tensor over tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Batch {
    /// `tokens` rows, shared by all sequences.
    Packed { tokens: usize },
    /// `batch` sequences of `tokens` rows each.
    Dense { batch: usize, tokens: usize },
}

impl Batch {
    /// Total rows.
    pub fn rows(self) -> usize {
        match self {
            Batch::Packed { tokens } => tokens,
            Batch::Dense { batch, tokens } => batch * tokens,
        }
    }
}

/// A tensor over tokens and heads: `[T, H, D]` for a packed batch, or `[B, T, H, D]` for a dense batch.
#[derive(Clone, Debug)]
pub struct Tokens<'a>(pub(crate) Tensor<'a, 4>, pub(crate) bool);

/// Mutable [`Tokens`].
#[derive(Debug)]
pub struct TokensMut<'a>(pub(crate) Tokens<'a>);

/// One number per token and head: `[T, H]` for a packed batch, or `[B, T, H]` for a dense batch.
///
/// The tensor's last dimension is 1, or the heads of a block: see [`TokenScalars::in_blocks`].
#[derive(Clone, Debug)]
pub struct TokenScalars<'a>(pub(crate) Tensor<'a, 4>, pub(crate) bool);

impl<'a> TokenScalars<'a> {
    /// Heads of a packed batch in blocks with any stride, `[T, blocks, heads of a block]`: see
    /// [`Gate::interleaved`](crate::gate::Gate::interleaved). If all heads have one stride, the result is a plain `[T,
    /// H]`. Otherwise only inputs of a [`Gate`](crate::gate::Gate) or a layer accept it.
    pub fn in_blocks(t: Tensor<'a, 3>) -> Self {
        let ([n, blocks, heads], [token, block, head]) = (t.shape, t.strides);
        if heads == 1 {
            TokenScalars(reshape(t, [1, n, blocks, 1], [0, token, block, 1]), false)
        } else if blocks == 1 || block == heads.saturating_mul(head) {
            let all = blocks.saturating_mul(heads);
            TokenScalars(reshape(t, [1, n, all, 1], [0, token, head, 1]), false)
        } else {
            TokenScalars(
                reshape(t, [1, n, blocks, heads], [0, token, block, head]),
                false,
            )
        }
    }
}

/// Mutable [`TokenScalars`].
#[derive(Debug)]
pub struct TokenScalarsMut<'a>(pub(crate) TokenScalars<'a>);

impl<'a> TokenScalarsMut<'a> {
    /// As [`TokenScalars::in_blocks`]: gradients of a [`GateBackward`](crate::gate::GateBackward) may have blocks.
    pub fn in_blocks(t: TensorMut<'a, 3>) -> Self {
        TokenScalarsMut(TokenScalars::in_blocks(t.0))
    }
}

fn reshape<'a, const R: usize>(
    t: Tensor<'a, R>,
    shape: [usize; 4],
    strides: [usize; 4],
) -> Tensor<'a, 4> {
    Tensor {
        address: t.address,
        dtype: t.dtype,
        shape,
        strides,
        owner: t.owner,
        borrow: PhantomData,
    }
}

impl<'a> From<Tensor<'a, 3>> for Tokens<'a> {
    fn from(t: Tensor<'a, 3>) -> Self {
        let ([n, h, d], [sn, sh, sd]) = (t.shape, t.strides);
        Tokens(reshape(t, [1, n, h, d], [0, sn, sh, sd]), false)
    }
}

impl<'a> From<Tensor<'a, 4>> for Tokens<'a> {
    fn from(t: Tensor<'a, 4>) -> Self {
        Tokens(t, true)
    }
}

impl<'a> From<Tensor<'a, 2>> for TokenScalars<'a> {
    fn from(t: Tensor<'a, 2>) -> Self {
        let ([n, h], [sn, sh]) = (t.shape, t.strides);
        TokenScalars(reshape(t, [1, n, h, 1], [0, sn, sh, 1]), false)
    }
}

impl<'a> From<Tensor<'a, 3>> for TokenScalars<'a> {
    fn from(t: Tensor<'a, 3>) -> Self {
        let ([b, n, h], [sb, sn, sh]) = (t.shape, t.strides);
        TokenScalars(reshape(t, [b, n, h, 1], [sb, sn, sh, 1]), true)
    }
}

impl<'a> From<TensorMut<'a, 3>> for TokensMut<'a> {
    fn from(t: TensorMut<'a, 3>) -> Self {
        TokensMut(t.0.into())
    }
}

impl<'a> From<TensorMut<'a, 4>> for TokensMut<'a> {
    fn from(t: TensorMut<'a, 4>) -> Self {
        TokensMut(t.0.into())
    }
}

impl<'a> From<TensorMut<'a, 2>> for TokenScalarsMut<'a> {
    fn from(t: TensorMut<'a, 2>) -> Self {
        TokenScalarsMut(t.0.into())
    }
}

impl<'a> From<TensorMut<'a, 3>> for TokenScalarsMut<'a> {
    fn from(t: TensorMut<'a, 3>) -> Self {
        TokenScalarsMut(t.0.into())
    }
}

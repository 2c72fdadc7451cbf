//! Owned tensors.

use half::{bf16, f16};
use regard::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656, i8_from_f32};
use regard::{DType, Error, Tensor, TensorMut};
use std::sync::Arc;

/// The elements of an [`Array`]; clones share them.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Data {
    F32(Arc<Vec<f32>>),
    F16(Arc<Vec<f16>>),
    BF16(Arc<Vec<bf16>>),
    I32(Arc<Vec<i32>>),
    /// One byte per element, 0 for false.
    Bool(Arc<Vec<u8>>),
    E4M3(Arc<Vec<E4m3>>),
    E5M2(Arc<Vec<E5m2>>),
    I8(Arc<Vec<i8>>),
    Q8_0(Arc<Vec<BlockQ8_0>>),
    Q4_0(Arc<Vec<BlockQ4_0>>),
    Mla656(Arc<Vec<Mla656>>),
}

/// Calls the body with the elements bound to a name, whatever their type.
macro_rules! with_elements {
    ($data:expr, $elements:ident => $body:expr) => {
        match $data {
            Data::F32($elements) => $body,
            Data::F16($elements) => $body,
            Data::BF16($elements) => $body,
            Data::I32($elements) => $body,
            Data::Bool($elements) => $body,
            Data::E4M3($elements) => $body,
            Data::E5M2($elements) => $body,
            Data::I8($elements) => $body,
            Data::Q8_0($elements) => $body,
            Data::Q4_0($elements) => $body,
            Data::Mla656($elements) => $body,
        }
    };
}

macro_rules! from_vec {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<Vec<$type>> for Data {
            fn from(elements: Vec<$type>) -> Data { Data::$variant(Arc::new(elements)) }
        }
    )*};
}
from_vec!(
    f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, u8 => Bool,
    E4m3 => E4M3, E5m2 => E5M2, i8 => I8, BlockQ8_0 => Q8_0, BlockQ4_0 => Q4_0,
    Mla656 => Mla656
);

/// The elements of blocks of several numbers each; numbers that do not fill a block are dropped.
fn blocks<const VALUES: usize, T>(
    numbers: impl Iterator<Item = f64>,
    one: impl Fn(&[f32; VALUES]) -> T,
) -> Vec<T> {
    let numbers: Vec<f32> = numbers.map(|x| x as f32).collect();
    numbers.as_chunks().0.iter().map(one).collect()
}

impl Data {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::BF16(_) => DType::BF16,
            Data::I32(_) => DType::I32,
            Data::Bool(_) => DType::Bool,
            Data::E4M3(_) => DType::E4M3,
            Data::E5M2(_) => DType::E5M2,
            Data::I8(_) => DType::I8,
            Data::Q8_0(_) => DType::Q8_0,
            Data::Q4_0(_) => DType::Q4_0,
            Data::Mla656(_) => DType::Mla656,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_elements!(self, elements => elements.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// These numbers, rounded to a type: `i32` are cut, and any number but 0 is true. Blocks take
    /// as many numbers as they have values.
    pub fn from_numbers(dtype: DType, numbers: impl Iterator<Item = f64>) -> Data {
        match dtype {
            DType::F32 => numbers.map(|x| x as f32).collect::<Vec<_>>().into(),
            DType::F16 => numbers.map(f16::from_f64).collect::<Vec<_>>().into(),
            DType::BF16 => numbers.map(bf16::from_f64).collect::<Vec<_>>().into(),
            DType::I32 => numbers.map(|x| x as i32).collect::<Vec<_>>().into(),
            DType::Bool => numbers.map(|x| u8::from(x != 0.0)).collect::<Vec<_>>().into(),
            DType::E4M3 => numbers.map(|x| E4m3::from_f32(x as f32)).collect::<Vec<_>>().into(),
            DType::E5M2 => numbers.map(|x| E5m2::from_f32(x as f32)).collect::<Vec<_>>().into(),
            DType::I8 => numbers.map(|x| i8_from_f32(x as f32)).collect::<Vec<_>>().into(),
            DType::Q8_0 => blocks(numbers, BlockQ8_0::from_f32).into(),
            DType::Q4_0 => blocks(numbers, BlockQ4_0::from_f32).into(),
            DType::Mla656 => blocks(numbers, Mla656::from_f32).into(),
            other => unreachable!("an element type of no tensor: {other}"),
        }
    }

    /// Elements from little-endian bytes; bytes that do not fill an element are dropped.
    pub fn from_le_bytes(dtype: DType, bytes: &[u8]) -> Data {
        fn each<const N: usize, T>(bytes: &[u8], one: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.chunks_exact(N).map(|x| one(x.try_into().expect("chunks of N bytes"))).collect()
        }
        match dtype {
            DType::F32 => each(bytes, f32::from_le_bytes).into(),
            DType::F16 => each(bytes, f16::from_le_bytes).into(),
            DType::BF16 => each(bytes, bf16::from_le_bytes).into(),
            DType::I32 => each(bytes, i32::from_le_bytes).into(),
            DType::Bool => bytes.to_vec().into(),
            DType::E4M3 => each(bytes, |[bits]| E4m3::from_bits(bits)).into(),
            DType::E5M2 => each(bytes, |[bits]| E5m2::from_bits(bits)).into(),
            DType::I8 => each(bytes, i8::from_le_bytes).into(),
            DType::Q8_0 => each(bytes, |bytes: [u8; 34]| {
                let codes = bytes.last_chunk::<BLOCK_VALUES>().expect("34 bytes");
                let scale = f16::from_le_bytes([bytes[0], bytes[1]]);
                BlockQ8_0 { scale, codes: codes.map(u8::cast_signed) }
            })
            .into(),
            DType::Q4_0 => each(bytes, |bytes: [u8; 18]| {
                let nibbles = *bytes.last_chunk().expect("18 bytes");
                BlockQ4_0 { scale: f16::from_le_bytes([bytes[0], bytes[1]]), nibbles }
            })
            .into(),
            DType::Mla656 => each(bytes, |bytes| Mla656::from_bytes(&bytes)).into(),
            other => unreachable!("an element type of no tensor: {other}"),
        }
    }

    /// The elements as little-endian bytes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Data::F32(elements) => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::F16(elements) => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::BF16(elements) => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::I32(elements) => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::Bool(elements) => elements.to_vec(),
            Data::E4M3(elements) => elements.iter().map(|x| x.to_bits()).collect(),
            Data::E5M2(elements) => elements.iter().map(|x| x.to_bits()).collect(),
            Data::I8(elements) => elements.iter().map(|x| x.cast_unsigned()).collect(),
            Data::Q8_0(elements) => {
                let bytes = |block: &BlockQ8_0| {
                    let codes = block.codes.map(i8::cast_unsigned);
                    block.scale.to_le_bytes().into_iter().chain(codes)
                };
                elements.iter().flat_map(bytes).collect()
            }
            Data::Q4_0(elements) => {
                let bytes =
                    |block: &BlockQ4_0| block.scale.to_le_bytes().into_iter().chain(block.nibbles);
                elements.iter().flat_map(bytes).collect()
            }
            Data::Mla656(elements) => elements.iter().flat_map(|row| row.to_bytes()).collect(),
        }
    }
}

/// An owned tensor: elements, and a shape (and strides) over them.
#[derive(Debug, Clone)]
pub struct Array {
    data: Data,
    offset: usize,
    shape: Vec<usize>,
    strides: Option<Vec<i64>>,
    /// Whether it looks at the first values of rows of `mla656` only.
    is_latent: bool,
}

impl Array {
    /// All of `data`, contiguous.
    ///
    /// # Errors
    /// If the shape has another number of elements.
    pub fn new(data: impl Into<Data>, shape: &[usize]) -> Result<Array, Error> {
        let array = Array {
            data: data.into(),
            offset: 0,
            shape: shape.to_vec(),
            strides: None,
            is_latent: false,
        };
        array.view()?;
        Ok(array)
    }

    /// Some of `data`: from element `offset` on, with these strides in elements.
    ///
    /// # Errors
    /// If shape and strides reach outside the data.
    pub fn strided(
        data: Data,
        offset: usize,
        shape: &[usize],
        strides: &[i64],
    ) -> Result<Array, Error> {
        if offset > data.len() {
            return Err(Error::argument(
                "offset",
                offset,
                format!("at most {} elements", data.len()),
            ));
        }
        let (shape, strides) = (shape.to_vec(), Some(strides.to_vec()));
        let array = Array { data, offset, shape, strides, is_latent: false };
        array.view()?;
        Ok(array)
    }

    /// The first `values` values of the last dimension, sharing the elements.
    ///
    /// # Errors
    /// If there are fewer, or if blocks of values would be cut.
    pub fn prefix(&self, values: usize) -> Result<Array, Error> {
        let view = self.view()?.prefix(values)?;
        let Array { data, offset, .. } = self.clone();
        Ok(Array {
            data,
            offset,
            shape: view.shape().to_vec(),
            strides: Some(view.strides().to_vec()),
            is_latent: view.dtype() == DType::Mla656Latent,
        })
    }

    /// A contiguous array, every element NaN (or 0 in types without it): an output before it is
    /// written.
    pub fn unwritten(dtype: DType, shape: &[usize]) -> Array {
        let length = shape.iter().product::<usize>();
        let data = Data::from_numbers(dtype, std::iter::repeat_n(f64::NAN, length));
        Array { data, offset: 0, shape: shape.to_vec(), strides: None, is_latent: false }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        if self.is_latent { DType::Mla656Latent } else { self.data.dtype() }
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements that it looks at, and the elements around them.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// A view for regard, dimensions as they are here.
    ///
    /// # Errors
    /// If the array has more dimensions than a tensor can have.
    pub fn view(&self) -> Result<Tensor<'_>, Error> {
        let strides = self.strides.as_deref();
        let view = with_elements!(&self.data, elements => {
            Tensor::from_slice(&elements[self.offset..], &self.shape, strides)
        })?;
        if self.is_latent { view.prefix(Mla656::LATENT_VALUES) } else { Ok(view) }
    }

    /// A view of the same elements with another shape and strides.
    pub(crate) fn reshaped(&self, shape: &[usize], strides: &[i64]) -> Result<Tensor<'_>, Error> {
        with_elements!(&self.data, elements => {
            Tensor::from_slice(&elements[self.offset..], shape, Some(strides))
        })
    }

    /// A view for regard to write. Elements shared with other arrays are copied first.
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn view_mut(&mut self) -> Result<TensorMut<'_>, Error> {
        let Array { data, offset, shape, strides, .. } = self;
        with_elements!(data, elements => {
            let elements = &mut Arc::make_mut(elements)[*offset..];
            TensorMut::from_slice(elements, shape, strides.as_deref())
        })
    }

    /// The same array without gaps, sharing nothing.
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn to_contiguous(&self) -> Result<Array, Error> {
        let Some(strides) = &self.strides else { return Ok(self.clone()) };
        let mut places = Vec::new();
        if !self.shape.contains(&0) {
            each_index(&self.shape, |index| {
                let steps = index.iter().zip(strides).map(|(&i, stride)| i as i64 * stride);
                places.push(self.offset.wrapping_add_signed(steps.sum::<i64>() as isize));
            });
        }
        let kept = with_elements!(&self.data, elements => {
            let kept: Vec<_> = places.iter().map(|&place| elements[place]).collect();
            Array::new(kept, &self.shape)
        })?;
        Ok(Array { is_latent: self.is_latent, ..kept })
    }

    /// All values in row-major order, as numbers ([`Tensor::at`]).
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn numbers(&self) -> Result<Vec<f64>, Error> {
        let view = self.view()?;
        let Some((&last, outer)) = self.shape.split_last() else {
            return Ok(vec![view.at(&[])]);
        };
        let columns = last * self.dtype().values();
        let rows = if columns == 0 { 0 } else { outer.iter().product() };
        let mut numbers = vec![0.0; rows * columns];
        let mut left = numbers.chunks_exact_mut(columns.max(1));
        if rows > 0 {
            each_index(outer, |index| view.read_row(index, left.next().expect("as many rows")));
        }
        Ok(numbers)
    }
}

/// Calls `visit` with every index of a shape without zeros, in row-major order.
fn each_index(shape: &[usize], mut visit: impl FnMut(&[usize])) {
    let mut index = vec![0; shape.len()];
    loop {
        visit(&index);
        let Some(next) = (0..shape.len()).rev().find(|&i| index[i] + 1 < shape[i]) else { return };
        index[next] += 1;
        index[next + 1..].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_walk_a_strided_array_in_row_major_order() {
        let data = Data::from((0..24).collect::<Vec<i32>>());
        let array = Array::strided(data, 1, &[2, 3, 2], &[2, 6, 1]).unwrap();
        let expected = [1.0, 2.0, 7.0, 8.0, 13.0, 14.0, 3.0, 4.0, 9.0, 10.0, 15.0, 16.0];
        assert_eq!(array.numbers().unwrap(), expected);
        assert_eq!(array.to_contiguous().unwrap().numbers().unwrap(), expected);
        assert!(Array::strided(Data::from(vec![0i32; 3]), 1, &[3], &[1]).is_err());
        assert!(Array::new(vec![0f32; 3], &[2, 2]).is_err());
    }

    #[test]
    fn bytes_come_back() {
        use DType::{BF16, Bool, E4M3, E5M2, F16, F32, I8, I32, Mla656, Q4_0, Q8_0};
        for dtype in [F32, F16, BF16, I32, Bool, E4M3, E5M2, I8, Q8_0, Q4_0, Mla656] {
            let numbers = [0.0, 1.0, 1.0].into_iter().cycle().take(3 * dtype.values());
            let data = Data::from_numbers(dtype, numbers);
            let again = Data::from_le_bytes(dtype, &data.to_le_bytes());
            assert_eq!((again.dtype(), again.len()), (dtype, 3));
            assert_eq!(again.to_le_bytes(), data.to_le_bytes());
            let every_second = Array::strided(data.clone(), 0, &[2, 1], &[2, 1]).unwrap();
            let kept = every_second.to_contiguous().unwrap();
            let bytes = data.to_le_bytes();
            let last = [&bytes[..dtype.size()], &bytes[2 * dtype.size()..]].concat();
            assert_eq!(kept.data().to_le_bytes(), last);
        }
    }
}

//! Owned tensors.

use half::{bf16, f16};
use regard::{DType, Error, Tensor, TensorMut};
use std::sync::Arc;

/// The elements of an [`Array`]; clones share them.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum Data {
    F32(Arc<Vec<f32>>),
    F16(Arc<Vec<f16>>),
    BF16(Arc<Vec<bf16>>),
    I32(Arc<Vec<i32>>),
    /// One byte an element, 0 for false.
    Bool(Arc<Vec<u8>>),
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
from_vec!(f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, u8 => Bool);

impl Data {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::BF16(_) => DType::BF16,
            Data::I32(_) => DType::I32,
            Data::Bool(_) => DType::Bool,
        }
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        with_elements!(self, elements => elements.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// These numbers, rounded to a type: integers are cut, and any number but 0 is true.
    pub fn from_numbers(dtype: DType, numbers: impl Iterator<Item = f64>) -> Data {
        match dtype {
            DType::F32 => numbers.map(|x| x as f32).collect::<Vec<_>>().into(),
            DType::F16 => numbers.map(f16::from_f64).collect::<Vec<_>>().into(),
            DType::BF16 => numbers.map(bf16::from_f64).collect::<Vec<_>>().into(),
            DType::I32 => numbers.map(|x| x as i32).collect::<Vec<_>>().into(),
            DType::Bool => numbers.map(|x| u8::from(x != 0.0)).collect::<Vec<_>>().into(),
            other => unimplemented!("case data of element type {other}"),
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
            other => unimplemented!("case data of element type {other}"),
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
}

impl Array {
    /// All of `data`, contiguous.
    ///
    /// # Errors
    /// If the shape has another number of elements.
    pub fn new(data: impl Into<Data>, shape: &[usize]) -> Result<Array, Error> {
        let array = Array { data: data.into(), offset: 0, shape: shape.to_vec(), strides: None };
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
        let array = Array { data, offset, shape: shape.to_vec(), strides: Some(strides.to_vec()) };
        array.view()?;
        Ok(array)
    }

    /// A contiguous array, every element NaN (or 0 in types without it): what an output holds
    /// before it is written.
    pub fn unwritten(dtype: DType, shape: &[usize]) -> Array {
        let length = shape.iter().product::<usize>();
        let data = Data::from_numbers(dtype, std::iter::repeat_n(f64::NAN, length));
        Array { data, offset: 0, shape: shape.to_vec(), strides: None }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements that it looks at, and those around them.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// A view for regard, dimensions as they are here.
    ///
    /// # Errors
    /// If the array has more dimensions than a tensor can have.
    pub fn view(&self) -> Result<Tensor<'_>, Error> {
        with_elements!(&self.data, elements => {
            Tensor::from_slice(&elements[self.offset..], &self.shape, self.strides.as_deref())
        })
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
        let Array { data, offset, shape, strides } = self;
        with_elements!(data, elements => {
            TensorMut::from_slice(&mut Arc::make_mut(elements)[*offset..], shape, strides.as_deref())
        })
    }

    /// The same array without gaps, sharing nothing.
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn to_contiguous(&self) -> Result<Array, Error> {
        if self.strides.is_none() {
            return Ok(self.clone());
        }
        Array::new(Data::from_numbers(self.dtype(), self.numbers()?.into_iter()), &self.shape)
    }

    /// All elements in row-major order, as numbers.
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn numbers(&self) -> Result<Vec<f64>, Error> {
        let view = self.view()?;
        let Some((&columns, outer)) = self.shape.split_last() else {
            return Ok(vec![view.at(&[])]);
        };
        let rows = if columns == 0 { 0 } else { outer.iter().product() };
        let mut numbers = vec![0.0; rows * columns];
        let mut index = vec![0; outer.len()];
        for row in numbers.chunks_exact_mut(columns.max(1)) {
            view.read_row(&index, row);
            for (i, &n) in index.iter_mut().zip(outer).rev() {
                *i += 1;
                if *i < n {
                    break;
                }
                *i = 0;
            }
        }
        Ok(numbers)
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
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::I32, DType::Bool] {
            let data = Data::from_numbers(dtype, [0.0, 1.0, 1.0].into_iter());
            let again = Data::from_le_bytes(dtype, &data.to_le_bytes());
            assert_eq!((again.dtype(), again.len()), (dtype, 3));
            assert_eq!(again.to_le_bytes(), data.to_le_bytes());
        }
    }
}

//! Case files: the one place that knows the format. It is described in `docs/case-files.md`.
//!
//! Files are untrusted: for any bytes the result is a case or an error, and allocations are
//! proportional to the file's size. The shapes are checked against each other when the case is
//! used.

use crate::array::{Array, Data};
use crate::case::{Case, KvLayout, Layout, Output};
use regard::{
    Attention, DType, Error, KeyOffset, KeyPositions, MAX_RANK, QueryOffset, Values, Window,
};
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// The key of `__metadata__` that holds a case's options.
const METADATA: &str = "attention";

const KEYS: &str = "layout, scale, causal, q_offset, key_offset, key_stride, window, chunk, \
                    softcap, indices_are_slots, kv_layout, k_format, v_format, value_dim";

/// The tensors of a problem that a file holds among its options.
const OFFSETS: [&str; 2] = ["q_offset", "key_offset"];

/// The tensors that a file can hold.
fn tensor_names() -> Vec<&'static str> {
    let mut names = vec!["q", "k", "v"];
    Attention::<()>::from_named(|name| {
        names.push(name);
        None
    });
    names.retain(|name| !OFFSETS.contains(name));
    names.extend(["out", "lse"]);
    names
}

/// Maximum product of an empty tensor's other dimensions: the file's size does not bound them, and
/// there is work per sequence.
const MAX_EMPTY: usize = 1 << 24;

/// Reads a case file.
///
/// # Errors
/// If it cannot be read, or as [`from_bytes`].
pub fn read(path: impl AsRef<Path>) -> Result<Case, Error> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).map_err(|error| {
        Error::argument(path.display().to_string(), format!("unreadable ({error})"), "a case file")
    })?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    from_bytes(&name, &bytes)
}

/// Reads a case from the bytes of a case file.
///
/// # Errors
/// If they are not a safetensors file, or hold a tensor or key that is not part of the format or
/// not of its type; the message names it, its value and the allowed values.
pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Case, Error> {
    // The reader's message can quote the file: control characters and all.
    let not_safetensors = |error: SafeTensorError| {
        let found = format!("broken ({})", shorten(&error.to_string()));
        Error::argument("case file", found, "a whole safetensors file")
    };
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(not_safetensors)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(not_safetensors)?;

    let known = tensor_names();
    let mut arrays = HashMap::new();
    for (tensor, view) in tensors.iter() {
        if !known.contains(&tensor) {
            return Err(Error::argument(shorten(tensor), "an unknown tensor", known.join(", ")));
        }
        arrays.insert(tensor.to_string(), array(tensor, &view)?);
    }
    let mut take = |name: &str| arrays.remove(name);
    let missing = |name| {
        Error::argument(name, "missing", "a tensor (every case has q, k, and v or value_dim)")
    };
    let q = take("q").ok_or_else(|| missing("q"))?;
    let k = take("k").ok_or_else(|| missing("k"))?;
    let v = take("v");
    let has_values = v.is_some();
    let mut case = Case::new(name, q, k.clone(), v.unwrap_or(k));
    case.attention = Attention::from_named(&mut take);
    case.expected_out = take("out");
    case.expected_lse = take("lse");

    let options = header.metadata().as_ref().and_then(|metadata| metadata.get(METADATA));
    let options = options.ok_or_else(|| {
        Error::argument("__metadata__.attention", "missing", "a string that holds a JSON object")
    })?;
    let value_dim = read_options(&mut case, options)?;
    match (value_dim, has_values) {
        (None, true) => {}
        (None, false) => return Err(missing("v")),
        (Some(value_dim), true) => {
            let allowed = "no tensor v beside it: values are the first dims of k";
            return Err(Error::argument("value_dim", value_dim, allowed));
        }
        (Some(value_dim), false) => {
            case.v = key_prefix(&case.k, value_dim)?;
            case.attention.values = Values::KeyPrefix;
        }
    }
    for (name, array) in [("k", &case.k), ("v", &case.v)] {
        if array.dtype() == DType::Bool {
            let found = format!("bytes without a {name}_format");
            return Err(Error::argument(name, found, "q8_0 or q4_0 as the format of bytes"));
        }
    }
    Ok(case)
}

/// Writes a case to a file. The output type and batch invariance are not part of the format; arrays
/// are written without gaps.
///
/// # Errors
/// If the file cannot be written, or as [`to_bytes`].
pub fn write(case: &Case, path: impl AsRef<Path>) -> Result<(), Error> {
    write_bytes(path.as_ref(), &to_bytes(case)?)
}

/// The bytes of a case's file.
///
/// # Errors
/// If an array has no view (too many dimensions).
pub fn to_bytes(case: &Case) -> Result<Vec<u8>, Error> {
    let has_values = case.attention.values == Values::Separate;
    let operands = [("q", &case.q), ("k", &case.k)].into_iter();
    let operands = operands.chain(has_values.then_some(("v", &case.v)));
    let options = case.attention.named().filter(|(name, _)| !OFFSETS.contains(name));
    let expected = [("out", case.expected_out.as_ref()), ("lse", case.expected_lse.as_ref())];
    let expected = expected.into_iter().filter_map(|(name, array)| Some((name, array?)));
    let metadata = HashMap::from([(METADATA.to_string(), metadata(case)?.to_string())]);
    serialize(operands.chain(options).chain(expected), Some(metadata))
}

/// Writes a result to a file: a safetensors file with `out` and `lse`, in the case's layout.
///
/// # Errors
/// If the file cannot be written.
pub fn write_output(output: &Output, path: impl AsRef<Path>) -> Result<(), Error> {
    write_bytes(path.as_ref(), &output_to_bytes(output)?)
}

/// The bytes of a result's file.
///
/// # Errors
/// If an array has no view (too many dimensions).
pub fn output_to_bytes(output: &Output) -> Result<Vec<u8>, Error> {
    let tensors = [("out", &output.out), ("lse", &output.lse)];
    serialize(tensors.into_iter(), None)
}

fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    std::fs::write(path, bytes).map_err(|error| {
        Error::argument(
            path.display().to_string(),
            format!("not writable ({error})"),
            "a path to write to",
        )
    })
}

fn serialize<'a>(
    tensors: impl Iterator<Item = (&'static str, &'a Array)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>, Error> {
    let mut contents = Vec::new();
    for (name, array) in tensors {
        let dtype = match array.dtype() {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I32 => Dtype::I32,
            DType::Bool => Dtype::BOOL,
            DType::E4M3 => Dtype::F8_E4M3,
            DType::E5M2 => Dtype::F8_E5M2,
            DType::I8 => Dtype::I8,
            DType::Q8_0 | DType::Q4_0 | DType::Mla656 => Dtype::U8,
            other => {
                return Err(Error::argument(
                    name,
                    other.to_string(),
                    "an element type of case files",
                ));
            }
        };
        let mut shape = array.shape().to_vec();
        if let Some(last) = shape.last_mut().filter(|_| array.dtype().is_block()) {
            *last *= array.dtype().size();
        }
        contents.push((name, dtype, shape, array.to_contiguous()?.data().to_le_bytes()));
    }
    let cannot = |error| {
        Error::argument("case", format!("not writable ({error})"), "tensors that fit a file")
    };
    let mut views = Vec::new();
    for (name, dtype, shape, bytes) in &contents {
        views.push((*name, TensorView::new(*dtype, shape.to_vec(), bytes).map_err(cannot)?));
    }
    safetensors::serialize(views, metadata).map_err(cannot)
}

fn array(name: &str, view: &TensorView) -> Result<Array, Error> {
    let allowed: &[(Dtype, DType)] = match name {
        "q" | "out" => {
            &[(Dtype::F32, DType::F32), (Dtype::F16, DType::F16), (Dtype::BF16, DType::BF16)]
        }
        "k" | "v" | "rotary_k" | "second_k" | "second_v" => &[
            (Dtype::F32, DType::F32),
            (Dtype::F16, DType::F16),
            (Dtype::BF16, DType::BF16),
            (Dtype::F8_E4M3, DType::E4M3),
            (Dtype::F8_E5M2, DType::E5M2),
            (Dtype::I8, DType::I8),
            // Until the options give the type of the bytes.
            (Dtype::U8, DType::Bool),
        ],
        "mask" => &[
            (Dtype::BOOL, DType::Bool),
            (Dtype::F32, DType::F32),
            (Dtype::F16, DType::F16),
            (Dtype::BF16, DType::BF16),
        ],
        "alibi_slopes" | "sinks" | "k_scales" | "v_scales" | "second_k_scales"
        | "second_v_scales" | "lse" => &[(Dtype::F32, DType::F32)],
        _ => &[(Dtype::I32, DType::I32)],
    };
    let Some(&(_, dtype)) = allowed.iter().find(|(dtype, _)| *dtype == view.dtype()) else {
        let names: Vec<_> = allowed.iter().map(|(dtype, _)| dtype.to_string()).collect();
        return Err(Error::argument(name, format!("of type {}", view.dtype()), names.join(" or ")));
    };
    let shape = view.shape();
    if shape.len() > MAX_RANK {
        let found = format!("of {} dimensions", shape.len());
        return Err(Error::argument(name, found, format!("at most {MAX_RANK} dimensions")));
    }
    let claimed = shape.iter().filter(|&&n| n != 0).try_fold(1usize, |all, &n| all.checked_mul(n));
    if shape.contains(&0) && claimed.is_none_or(|claimed| claimed > MAX_EMPTY) {
        let found = format!("of shape {shape:?}");
        return Err(Error::argument(
            name,
            found,
            format!("at most {MAX_EMPTY} rows in an empty tensor"),
        ));
    }
    Array::new(Data::from_le_bytes(dtype, view.data()), shape)
}

/// The first dims of the keys as values.
fn key_prefix(k: &Array, value_dim: usize) -> Result<Array, Error> {
    let prefix = k.prefix(value_dim).ok().filter(|_| value_dim > 0);
    prefix.ok_or_else(|| {
        let found = format!("{value_dim} over k of {} {:?}", k.dtype(), k.shape());
        Error::argument("value_dim", found, "from 1 to the head dim of k, in whole blocks")
    })
}

/// Reads the options. Returns the head dim of values that are the first dims of keys.
fn read_options(case: &mut Case, text: &str) -> Result<Option<usize>, Error> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        Error::argument("__metadata__.attention", format!("broken ({error})"), "a JSON object")
    })?;
    let Value::Object(options) = value else {
        return Err(wrong("__metadata__.attention", &value, "a JSON object"));
    };
    let mut value_dim = None;
    for (key, value) in &options {
        // Absent and null are the same: the default.
        let null = value.is_null();
        match key.as_str() {
            "layout" if !null => {
                case.layout = word(key, value, &[("bshd", Layout::Bshd), ("bhsd", Layout::Bhsd)])?;
            }
            "kv_layout" if !null => {
                case.kv_layout =
                    word(key, value, &[("nhd", KvLayout::Nhd), ("hnd", KvLayout::Hnd)])?;
            }
            "scale" if !null => case.attention.scale = Some(number(key, value, "a finite number")?),
            "softcap" if !null => {
                let allowed = "a finite number above 0";
                let cap = number(key, value, allowed)?;
                if cap <= 0.0 {
                    return Err(wrong(key, value, allowed));
                }
                case.attention.softcap = Some(cap);
            }
            "causal" if !null => {
                case.attention.causal =
                    value.as_bool().ok_or_else(|| wrong(key, value, "true or false"))?;
            }
            "indices_are_slots" if !null => {
                case.attention.indices_are_slots =
                    value.as_bool().ok_or_else(|| wrong(key, value, "true or false"))?;
            }
            "window" if !null => case.attention.window = window(value)?,
            "chunk" if !null => {
                let chunk = value.as_u64().and_then(|chunk| usize::try_from(chunk).ok());
                let allowed = "a whole number from 1 to 2^31 - 1";
                case.attention.chunk = Some(chunk.ok_or_else(|| wrong(key, value, allowed))?);
            }
            "q_offset" if !null => {
                case.attention.q_offset = match offset(key, value)? {
                    KeyOffset::Same(offset) => QueryOffset::Same(offset),
                    KeyOffset::PerSequence(offsets) => QueryOffset::PerSequence(offsets),
                    _ => return Err(wrong(key, value, "one position, or one per sequence")),
                };
            }
            "key_offset" if !null => key_positions(case).offset = offset(key, value)?,
            "key_stride" if !null => {
                let stride = value.as_u64().and_then(|stride| usize::try_from(stride).ok());
                let allowed = "a whole number from 1 to 2^15";
                key_positions(case).stride = stride.ok_or_else(|| wrong(key, value, allowed))?;
            }
            "value_dim" if !null => {
                let dim = value.as_u64().and_then(|dim| usize::try_from(dim).ok());
                value_dim = Some(dim.ok_or_else(|| wrong(key, value, "a whole number from 1 up"))?);
            }
            "k_format" if !null => {
                case.k = blocks("k", &case.k, value)?;
                let second = case.attention.second_k.take();
                case.attention.second_k = second.map(|k| blocks("k", &k, value)).transpose()?;
                let rotary = case.attention.rotary_k.take();
                case.attention.rotary_k = rotary.map(|k| blocks("k", &k, value)).transpose()?;
            }
            "v_format" if !null => {
                case.v = blocks("v", &case.v, value)?;
                let second = case.attention.second_v.take();
                case.attention.second_v = second.map(|v| blocks("v", &v, value)).transpose()?;
            }
            "k_format" | "v_format" | "layout" | "kv_layout" | "scale" | "softcap" | "causal"
            | "window" | "chunk" | "q_offset" | "key_offset" | "key_stride"
            | "indices_are_slots" | "value_dim" => {}
            _ => return Err(Error::argument(shorten(key), "an unknown key", KEYS)),
        }
    }
    match options.get("v_format").filter(|format| value_dim.is_some() && !format.is_null()) {
        Some(format) => Err(wrong("v_format", format, "none beside value_dim: values are in k")),
        None => Ok(value_dim),
    }
}

/// Keys or values that a file holds as bytes, as the blocks that they are.
fn blocks(name: &str, bytes: &Array, format: &Value) -> Result<Array, Error> {
    let formats = [("q8_0", DType::Q8_0), ("q4_0", DType::Q4_0), ("mla656", DType::Mla656)];
    let dtype = word(&format!("{name}_format"), format, &formats)?;
    let size = dtype.size();
    let mut shape = bytes.shape().to_vec();
    let last = shape.last_mut().filter(|last| last.is_multiple_of(size));
    let Some(last) = last.filter(|_| bytes.dtype() == DType::Bool) else {
        let found = format!("{} of shape {:?}", bytes.dtype(), bytes.shape());
        let allowed = format!("U8, the last dimension a multiple of {size}: blocks of {dtype}");
        return Err(Error::argument(name, found, allowed));
    };
    *last /= size;
    Array::new(Data::from_le_bytes(dtype, &bytes.data().to_le_bytes()), &shape)
}

/// The options as JSON, defaults left out.
fn metadata(case: &Case) -> Result<Value, Error> {
    let mut options = Map::new();
    let mut set = |key: &str, value: Value| options.insert(key.to_string(), value);
    set("layout", json!(if case.layout == Layout::Bhsd { "bhsd" } else { "bshd" }));
    if let Some(scale) = case.attention.scale {
        // Through the shortest decimal that is this f32, not its f64 expansion.
        set("scale", decimal("scale", scale)?);
    }
    if case.attention.causal {
        set("causal", json!(true));
    }
    match &case.attention.q_offset {
        QueryOffset::BottomRight => {}
        QueryOffset::Same(offset) => {
            set("q_offset", json!(offset));
        }
        QueryOffset::PerSequence(offsets) => {
            set("q_offset", whole_numbers(offsets)?);
        }
        _ => return Err(Error::argument("q_offset", "of another kind", "what a case file holds")),
    }
    if let Some(KeyPositions { offset, stride }) = &case.attention.key_positions {
        let offset = match offset {
            KeyOffset::Same(offset) => json!(offset),
            KeyOffset::PerSequence(offsets) => whole_numbers(offsets)?,
            _ => {
                let allowed = "what a case file holds";
                return Err(Error::argument("key_offset", "of another kind", allowed));
            }
        };
        set("key_offset", offset);
        set("key_stride", json!(stride));
    }
    if case.attention.window != Window::default() {
        set("window", json!([case.attention.window.left, case.attention.window.right]));
    }
    if case.attention.indices_are_slots {
        set("indices_are_slots", json!(true));
    }
    if let Some(chunk) = case.attention.chunk {
        set("chunk", json!(chunk));
    }
    if let Some(cap) = case.attention.softcap {
        set("softcap", decimal("softcap", cap)?);
    }
    let separate = case.attention.values == Values::Separate;
    if !separate {
        set("value_dim", json!(case.value_dim()));
    }
    for (key, array) in [("k_format", &case.k), ("v_format", &case.v)] {
        if array.dtype().is_block() && (separate || key == "k_format") {
            set(key, json!(array.dtype().name()));
        }
    }
    if case.kv_layout == KvLayout::Hnd {
        set("kv_layout", json!("hnd"));
    }
    Ok(Value::Object(options))
}

fn decimal(key: &str, x: f32) -> Result<Value, Error> {
    let shortest: Option<f64> = x.to_string().parse().ok();
    let number = shortest.and_then(serde_json::Number::from_f64);
    number.map(Value::Number).ok_or_else(|| Error::argument(key, x, "a finite number"))
}

fn word<T: Copy>(key: &str, value: &Value, words: &[(&str, T)]) -> Result<T, Error> {
    let found = words.iter().find(|(word, _)| value.as_str() == Some(word));
    found.map(|&(_, meaning)| meaning).ok_or_else(|| {
        let allowed: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        wrong(key, value, &allowed.join(" or "))
    })
}

/// A number that is finite as f32.
fn number(key: &str, value: &Value, allowed: &str) -> Result<f32, Error> {
    let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
    number.ok_or_else(|| wrong(key, value, allowed))
}

fn window(value: &Value) -> Result<Window, Error> {
    let allowed = "[left, right], each a whole number from 0 up, or null for unbounded";
    let side = |value: &Value| -> Result<Option<usize>, Error> {
        match value {
            Value::Null => Ok(None),
            _ => match value.as_u64().and_then(|side| usize::try_from(side).ok()) {
                Some(side) => Ok(Some(side)),
                None => Err(wrong("window", value, allowed)),
            },
        }
    };
    match value.as_array().map(Vec::as_slice) {
        Some([left, right]) => Ok(Window { left: side(left)?, right: side(right)? }),
        _ => Err(wrong("window", value, allowed)),
    }
}

/// The positions of keys, to fill in: either key of the options gives them.
fn key_positions(case: &mut Case) -> &mut KeyPositions<Array> {
    let plain = KeyPositions { offset: KeyOffset::Same(0), stride: 1 };
    case.attention.key_positions.get_or_insert(plain)
}

fn whole_numbers(array: &Array) -> Result<Value, Error> {
    let numbers: Vec<i64> = array.numbers()?.into_iter().map(|number| number as i64).collect();
    Ok(json!(numbers))
}

/// One position for all sequences, or one each.
fn offset(key: &str, value: &Value) -> Result<KeyOffset<Array>, Error> {
    let one = |argument: String, value: &Value| {
        let offset = value.as_i64().and_then(|offset| i32::try_from(offset).ok());
        offset.ok_or_else(|| {
            wrong(
                &argument,
                value,
                "a whole number of -2^31..2^31, or an array of them, one per sequence",
            )
        })
    };
    match value {
        Value::Array(offsets) => {
            let offsets =
                offsets.iter().enumerate().map(|(i, offset)| one(format!("{key}[{i}]"), offset));
            let offsets: Vec<i32> = offsets.collect::<Result<_, Error>>()?;
            let shape = [offsets.len()];
            Ok(KeyOffset::PerSequence(Array::new(offsets, &shape)?))
        }
        _ => Ok(KeyOffset::Same(i64::from(one(key.into(), value)?))),
    }
}

fn wrong(argument: &str, value: &Value, allowed: &str) -> Error {
    Error::argument(argument, shorten(&value.to_string()), allowed)
}

/// The start of a text that came from a file, fit for one line of a message.
fn shorten(text: &str) -> String {
    const MOST: usize = 80;
    let mut short: String = text
        .chars()
        .take(MOST)
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect();
    if text.chars().nth(MOST).is_some() {
        short.push_str("...");
    }
    short
}

//! Declaration of parameters: a macro makes Rust types of them and describes them. The descriptions
//! are printed in the languages of kernels.

/// A language that kernels are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// CUDA C++.
    Cuda,
    /// Metal Shading Language.
    Metal,
}

/// The type of a field: its name in each language.
pub trait FieldType {
    /// In CUDA C++.
    const CUDA: &'static str;
    /// In the Metal Shading Language.
    const METAL: &'static str;
}

macro_rules! field_types {
    ($($type:ty => $cuda:literal, $metal:literal;)*) => {$(
        impl FieldType for $type {
            const CUDA: &'static str = $cuda;
            const METAL: &'static str = $metal;
        }
    )*};
}
field_types! {
    u64 => "unsigned long long", "ulong";
    i64 => "long long", "long";
    u32 => "unsigned int", "uint";
    i32 => "int", "int";
    f32 => "float", "float";
}

/// One value of an enum.
#[derive(Debug, Clone, Copy)]
pub struct Value {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// Its documentation.
    pub comment: &'static str,
    /// Its number.
    pub number: i32,
}

/// An enum as kernels see it.
#[derive(Debug, Clone, Copy)]
pub struct Enumeration {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// Its documentation.
    pub comment: &'static str,
    /// Its values, in order.
    pub values: &'static [Value],
}

/// An enum of parameters.
pub trait Enumerated: Copy {
    /// Its declaration.
    const ENUMERATION: Enumeration;
}

/// One field of a struct.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// Its documentation.
    pub comment: &'static str,
    /// Its type in CUDA C++.
    pub cuda: &'static str,
    /// Its type in the Metal Shading Language.
    pub metal: &'static str,
    /// Bytes from the struct's start.
    pub offset: usize,
    /// Bytes it takes.
    pub size: usize,
}

/// A struct as kernels see it.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Its name, the same in every language.
    pub name: &'static str,
    /// Its documentation.
    pub comment: &'static str,
    /// Bytes in all.
    pub size: usize,
    /// Its fields, in order.
    pub fields: &'static [Field],
}

/// A parameter struct.
pub trait Parameters: Copy {
    /// Its declaration.
    const LAYOUT: Layout;
}

/// Declares enums and structs of parameters, each with its documentation.
///
/// A field is a `u64` (an address), `i64`, `u32`, `i32` or `f32`, an enum, or a struct declared
/// before it. An enum's default is its first value.
macro_rules! parameters {
    () => {};
    (
        $(#[doc = $comment:literal])+
        enum $name:ident {
            $(#[doc = $first_comment:literal])+
            $first:ident,
            $($(#[doc = $value_comment:literal])+ $value:ident,)*
        }
        $($rest:tt)*
    ) => {
        $(#[doc = $comment])+
        #[repr(i32)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub enum $name {
            $(#[doc = $first_comment])+
            #[default]
            $first,
            $($(#[doc = $value_comment])+ $value,)*
        }

        impl $crate::params::Enumerated for $name {
            const ENUMERATION: $crate::params::Enumeration = $crate::params::Enumeration {
                name: stringify!($name),
                comment: concat!($($comment),+),
                values: &[
                    $crate::params::Value {
                        name: stringify!($first),
                        comment: concat!($($first_comment),+),
                        number: $name::$first as i32,
                    },
                    $($crate::params::Value {
                        name: stringify!($value),
                        comment: concat!($($value_comment),+),
                        number: $name::$value as i32,
                    },)*
                ],
            };
        }

        impl $crate::params::FieldType for $name {
            const CUDA: &'static str = stringify!($name);
            const METAL: &'static str = stringify!($name);
        }

        $crate::params::parameters! { $($rest)* }
    };
    (
        $(#[doc = $comment:literal])+
        $name:ident { $($(#[doc = $field_comment:literal])+ $field:ident: $type:ty,)* }
        $($rest:tt)*
    ) => {
        $(#[doc = $comment])+
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct $name { $($(#[doc = $field_comment])+ pub $field: $type,)* }

        impl $crate::params::Parameters for $name {
            const LAYOUT: $crate::params::Layout = $crate::params::Layout {
                name: stringify!($name),
                comment: concat!($($comment),+),
                size: size_of::<$name>(),
                fields: &[$($crate::params::Field {
                    name: stringify!($field),
                    comment: concat!($($field_comment),+),
                    cuda: <$type as $crate::params::FieldType>::CUDA,
                    metal: <$type as $crate::params::FieldType>::METAL,
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of::<$type>(),
                },)*],
            };
        }

        impl $crate::params::FieldType for $name {
            const CUDA: &'static str = stringify!($name);
            const METAL: &'static str = stringify!($name);
        }

        $crate::params::parameters! { $($rest)* }
    };
}
pub(crate) use parameters;

/// The widest line of a kernel.
const KERNEL_WIDTH: usize = 120;

/// A declaration and its comment: after it, or on the lines before if the line would be too wide.
/// Comments start with a space, as Rust has them.
fn with_comment(declaration: &str, comment: &str) -> String {
    let line = format!("{declaration} //{comment}");
    if line.len() <= KERNEL_WIDTH {
        return line + "\n";
    }
    let indent = declaration.len() - declaration.trim_start().len();
    let mut text = comment_lines(comment, indent);
    text.push_str(declaration);
    text.push('\n');
    text
}

/// A comment on separate lines.
fn comment_lines(comment: &str, indent: usize) -> String {
    let start = format!("{:indent$}//", "");
    let (mut text, mut line) = (String::new(), start.clone());
    for word in comment.split_whitespace() {
        if line.len() + 1 + word.len() > KERNEL_WIDTH {
            text.push_str(&line);
            text.push('\n');
            line.clone_from(&start);
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
    text
}

impl Enumeration {
    /// The enum as text, the same in CUDA C++ and the Metal Shading Language.
    pub fn declaration(&self) -> String {
        let mut text = comment_lines(self.comment, 0);
        text.push_str(&format!("enum class {} : int {{\n", self.name));
        for Value { name, comment, number } in self.values {
            text.push_str(&with_comment(&format!("    {name} = {number},"), comment));
        }
        text.push_str("};\n");
        text
    }
}

impl Layout {
    /// The struct as text, with an assertion of its size.
    pub fn declaration(&self, language: Language) -> String {
        let Layout { name, size, .. } = self;
        let mut text = comment_lines(self.comment, 0);
        text.push_str(&format!("struct {name} {{\n"));
        for field in self.fields {
            let type_name = match language {
                Language::Cuda => field.cuda,
                Language::Metal => field.metal,
            };
            let declaration = format!("    {type_name} {};", field.name);
            text.push_str(&with_comment(&declaration, field.comment));
        }
        // Offsets need no separate assertion: fields have no gaps, because on the host the sum of
        // their sizes is the struct's size.
        text.push_str(&format!(
            "}};\nstatic_assert(sizeof({name}) == {size}, \"as the host has it\");\n"
        ));
        text
    }

    /// Bytes that the fields take, without any padding.
    pub fn packed_size(&self) -> usize {
        self.fields.iter().map(|field| field.size).sum()
    }
}

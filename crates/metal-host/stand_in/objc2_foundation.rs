//! In the place of `objc2-foundation`: strings, errors, arrays and file addresses.

use std::fmt;
use std::sync::Arc;

#[derive(Debug)]
pub struct NSString(pub String);

impl NSString {
    pub fn from_str(text: &str) -> Arc<NSString> {
        Arc::new(NSString(text.into()))
    }
}

impl fmt::Display for NSString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug)]
pub struct NSError(pub String);

impl NSError {
    pub fn localizedDescription(&self) -> Arc<NSString> {
        NSString::from_str(&self.0)
    }
}

#[derive(Debug)]
pub struct NSArray<T>(pub Vec<Arc<T>>);

impl<T> NSArray<T> {
    pub fn from_retained_slice(objects: &[Arc<T>]) -> Arc<NSArray<T>> {
        Arc::new(NSArray(objects.to_vec()))
    }
}

#[derive(Debug)]
pub struct NSURL(pub String);

impl NSURL {
    pub fn fileURLWithPath(path: &NSString) -> Arc<NSURL> {
        Arc::new(NSURL(path.0.clone()))
    }
}

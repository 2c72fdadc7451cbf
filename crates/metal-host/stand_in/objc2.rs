//! In the place of `objc2`: retained objects, protocols and autorelease pools.

pub mod rc {
    use super::super::POOLS;

    pub type Retained<T> = std::sync::Arc<T>;

    pub fn autoreleasepool<T>(work: impl FnOnce(()) -> T) -> T {
        POOLS.set(POOLS.get() + 1);
        let result = work(());
        POOLS.set(POOLS.get() - 1);
        result
    }
}

/// An object that is retained by who has a reference to it.
pub trait Message {
    fn retain(&self) -> rc::Retained<Self>;
}

impl<P: ?Sized + runtime::Protocol> Message for runtime::ProtocolObject<P> {
    fn retain(&self) -> rc::Retained<Self> {
        // SAFETY: every object here is in an `Arc`: nothing else makes one.
        unsafe {
            std::sync::Arc::increment_strong_count(self);
            std::sync::Arc::from_raw(self)
        }
    }
}

pub mod runtime {
    use std::fmt;

    /// A protocol, and what an object of it is here.
    pub trait Protocol {
        type State;
    }

    /// An object that is known by a protocol. Thin, as an Objective-C object is.
    pub struct ProtocolObject<P: ?Sized + Protocol>(pub P::State);

    impl<P: ?Sized + Protocol<State: fmt::Debug>> fmt::Debug for ProtocolObject<P> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }
}
